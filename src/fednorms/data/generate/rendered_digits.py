"""A substitute for SynthDigits: digits rendered with the fonts of matplotlib.

Paper: Ganin, Lempitsky, Unsupervised Domain Adaptation by Backpropagation, ICML 2015, https://arxiv.org/abs/1409.7495
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.data.rules import draws

_CONTRAST = 40
_FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSans-Oblique")


def fonts() -> list[Path]:
    """The DejaVu faces inside matplotlib, if that is installed (it is not imported).

    >>> all(path.suffix == ".ttf" for path in fonts())
    True
    """
    found = find_spec("matplotlib")
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
    return [path for face in _FACES if (path := folder / f"{face}.ttf").is_file()]


def synth_digits(count: int, seed: int = 0, size: int = 32) -> tuple[Tensor, Tensor]:
    """Render colored digits on colored ground (uint8, count x 3 x size x size), with labels 0, 1, ..., 9, 0, ...

    The digit in the center is the label; neighbors with probability 1/2, rotation up to 20 degrees, text and ground
    at least 40 apart in luminance, Gaussian blur up to 1.5 pixels, in DejaVu (or Pillow's own font without matplotlib).
    For tests and demonstrations only: the published set has other fonts, so results cannot be compared with it.

    >>> x, y = synth_digits(12)
    >>> tuple(x.shape), y.tolist()
    ((12, 3, 32, 32), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    """
    if count < 1 or not 12 <= size <= 256:
        raise BadInput(f"synth_digits: count must be positive and size 12 to 256, got {count} and {size}.")
    r = draws("synth-digits", seed)
    faces = fonts()
    heights = [round(size * part) for part in (0.6, 0.7, 0.8)]
    made = [ImageFont.truetype(str(f), h) for f in faces for h in heights] if faces else []
    usable: list[ImageFont.FreeTypeFont | ImageFont.ImageFont] = [*made] or [
        ImageFont.load_default(size=h) for h in heights
    ]
    out = np.stack([_render(i % 10, usable[r.randint(len(usable))], size, r) for i in range(count)])
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous(), torch.arange(count) % 10


def _render(
    digit: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, size: int, r: np.random.RandomState
) -> np.ndarray:
    ink = Image.new("L", (size, size), 0)
    pen = ImageDraw.Draw(ink)
    step = pen.textlength("0", font=font) * r.uniform(0.95, 1.15)
    x, y = size / 2 + r.uniform(-1, 1) * size / 16, size / 2 + r.uniform(-1, 1) * size / 16
    pen.text((x, y), str(digit), fill=255, font=font, anchor="mm")
    for side in (-1, 1):
        if r.random_sample() < 0.5:
            pen.text((x + side * step, y), str(r.randint(10)), fill=255, font=font, anchor="mm")
    ink = ink.rotate(r.uniform(-20, 20), Image.Resampling.BILINEAR)
    ground, text = _colors(r)
    picture = Image.composite(Image.new("RGB", ink.size, text), Image.new("RGB", ink.size, ground), ink)
    return np.asarray(picture.filter(ImageFilter.GaussianBlur(r.uniform(0, 1.5))))


def _colors(r: np.random.RandomState) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Two colors that differ enough in luminance; the second is black or white if 50 draws find none."""
    ground = r.randint(0, 256, 3)
    for _ in range(50):
        text = r.randint(0, 256, 3)
        if abs(_luminance(text) - _luminance(ground)) >= _CONTRAST:
            break
    else:
        text = np.full(3, 0 if _luminance(ground) > 127 else 255)
    return tuple(map(int, ground)), tuple(map(int, text))  # type: ignore[return-value]


def _luminance(color: np.ndarray) -> float:
    return float(color @ [0.299, 0.587, 0.114])
