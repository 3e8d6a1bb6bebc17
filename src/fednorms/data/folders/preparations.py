"""Preparations of image files besides resizing, by the text that federations, runs and exported models store."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
from PIL import Image

from fednorms.data.folders.decode import Prepared

_LESION = "shorter side {side}, shades of grey 6, its middle"  # part of cache keys and of stored files


def lesion_square(side: int) -> Prepared:
    """How Fed-ISIC2019 prepares images, for squares of `side` pixels.

    >>> lesion_square(224).name
    'shorter side 224, shades of grey 6, its middle'
    """
    steps = (
        f"resize to a shorter side of {side} pixels and a longer side of int(longer * {side} / shorter), with Pillow's "
        "bilinear (antialiased)",
        "color constancy on these pixels: e_c = (mean of I_c^6)^(1/6) per channel, e = e / |e|, "
        "I_c = min(255, I_c / (sqrt(3) e_c)), fractions cut off",
        f"crop the middle square of {side} pixels, at (width - {side}) // 2 and (height - {side}) // 2",
    )
    return Prepared(_LESION.format(side=side), partial(lesion, side=side), steps)


def preparation(name: str) -> Prepared | None:
    """The preparation with this stored text; None if this version of fednorms does not have it.

    >>> preparation("shorter side 64, shades of grey 6, its middle") is not None, preparation("polished")
    (True, None)
    """
    pattern = re.escape(_LESION).replace(re.escape("{side}"), "([1-9][0-9]{0,4})")
    found = re.fullmatch(pattern, name)
    return lesion_square(int(found[1])) if found else None


def lesion(image: Image.Image, side: int) -> Image.Image:
    """A picture as Fed-ISIC2019 prepares it: shorter side `side`, color constancy, the middle square.

    >>> lesion(Image.new("RGB", (600, 450), (120, 60, 30)), 224).size
    (224, 224)
    """
    image = image.convert("RGB")
    scale = side / min(image.size)
    wide, high = (max(side, int(n * scale)) for n in image.size)
    image = image.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = (wide - side) // 2, (high - side) // 2
    return Image.fromarray(shades_of_gray(np.asarray(image))).crop((left, top, left + side, top + side))


def shades_of_gray(pixels: np.ndarray, power: int = 6) -> np.ndarray:
    """Color constancy: every channel divided by sqrt(3) times its share of the scene's color.

    >>> shades_of_gray(np.full((2, 2, 3), 90, np.uint8))[0, 0].tolist()
    [90, 90, 90]
    """
    x = pixels.astype(np.float64)
    scene = np.power(np.power(x, power).mean((0, 1)), 1 / power)
    length = math.sqrt(float((scene**2).sum()))
    if length == 0:
        return pixels
    scene = np.maximum(scene / length, 1e-6)
    # A value such as 89.99999 is 90 in exact numbers; the cast cuts fractions off, as the original does.
    return np.clip(x / (math.sqrt(3) * scene) + 1e-9, 0, 255).astype(np.uint8)
