"""Turn image files into pixels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.data.federation import raise_problems
from fednorms.data.folders.scan import ImageFile

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_NAMED = 10  # unreadable files named in one message


@dataclass(frozen=True)
class Prepared:
    """How an opened image becomes pixels, where resizing is not enough; the name tells caches apart.

    `pixels` returns an image of the wanted size and mode.
    """

    name: str
    pixels: Callable[[Image.Image], Image.Image]


def read_image(path: str | Path, shape: tuple[int, int, int]) -> torch.Tensor:
    """One image file as uint8 of shape (C, H, W), decoded and resized as `from_folders` does with a size.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("L", (9, 5)).save(Path(root, "a.png"))
    ...     read_image(Path(root, "a.png"), (3, 4, 4)).shape
    torch.Size([3, 4, 4])
    """
    channels, height, width = shape
    if channels not in MODES:
        raise BadInput(f"image files have 1, 3 or 4 channels, not {channels}")
    try:
        with Image.open(path) as image:
            upright = _upright(_single(image))
            size = None if (upright.height, upright.width) == (height, width) else (width, height)
            pixels = np.array(_converted(upright, channels, size))
    except Exception as problem:  # Pillow's decoders raise almost anything on broken files
        raise BadInput(f"{str(path)!r} cannot be read: {problem}") from problem
    return torch.from_numpy(np.ascontiguousarray(pixels.reshape(height, width, channels).transpose(2, 0, 1)))


def first_size(files: Sequence[ImageFile]) -> tuple[int, int]:
    """Height and width of the first image that can be opened (one that cannot is reported when decoding)."""
    for file in files:
        try:
            with Image.open(file.path) as image:
                upright = _upright(image)
                return upright.height, upright.width
        except Exception:  # Pillow's decoders raise almost anything on broken files
            continue
    raise BadInput(f"none of the {len(files)} images can be read, first {str(files[0].path)!r}")


def decode(
    root: Path, files: Sequence[ImageFile], images: np.ndarray, resize: bool, prepared: Prepared | None
) -> np.ndarray:
    """Fill `images` (N,C,H,W) from the files, several at a time, or say which cannot be read."""
    _, channels, height, width = images.shape
    sizes: list[tuple[int, int]] = [(height, width)] * len(files)
    brightest: list[int] = []  # pixel of each image of 16 bits

    def one(i: int) -> str | None:
        try:
            with Image.open(files[i].path) as stored:
                # Cameras store how they were held. Papers' programs do not look at it, so data sets are read as stored.
                image = stored if files[i].of_data_set else _upright(_single(stored))
                sizes[i] = (image.height, image.width)
                if image.mode.startswith("I"):
                    brightest.append(int(np.asarray(image).max(initial=0)))
                if not resize and sizes[i] != (height, width):
                    return None
                ready = image if prepared is None else prepared.pixels(image)
                pixels = np.asarray(_converted(ready, channels, (width, height) if resize else None))
        except Exception as problem:  # Pillow's decoders raise almost anything on broken files
            return f"{str(files[i].path)!r} cannot be read: {problem}"
        images[i] = pixels.reshape(height, width, channels).transpose(2, 0, 1)
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        unreadable = [problem for problem in pool.map(one, range(len(files))) if problem]
    problems = unreadable[:_NAMED]
    if len(unreadable) > _NAMED:
        problems.append(f"and {len(unreadable) - _NAMED} more that cannot be read")
    other = [i for i, found in enumerate(sizes) if found != (height, width)]
    if other and not resize:
        same = next(i for i in range(len(files)) if sizes[i] == (height, width))
        (high, wide), path = sizes[other[0]], str(files[other[0]].path)
        problems.append(
            f"images differ in size: {str(files[same].path)!r} is {height}x{width} (height x width), "
            f"{path!r} is {high}x{wide}; set size= to resize them"
        )
    raise_problems(f"folder {str(root)!r}", problems)
    if brightest and max(brightest) < 2**14:
        warnings.warn(
            f"folder {str(root)!r}: {len(brightest)} images of 16 bits have no pixel above {max(brightest)}: they are "
            "dark and coarse when scaled to eight bits. Scale their values to 0 to 65535 first.",
            stacklevel=3,
        )
    return images


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _single(image: Image.Image) -> Image.Image:
    """Refuse a stack of slices, of which one alone would be read; of moving pictures the first frame is meant."""
    if image.format == "TIFF" and (pages := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it holds {pages} pages; store each as an image of its own")
    return image


def _upright(image: Image.Image) -> Image.Image:
    """A photograph as it was taken: cameras store how they were held."""
    try:
        turn = _TURNS.get(image.getexif().get(0x0112, 1))
    except Exception:  # damaged EXIF says nothing about the pixels
        return image
    return image if turn is None else image.transpose(turn)


def _converted(image: Image.Image, channels: int, size: tuple[int, int] | None) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey (X-rays): scaled to eight bits, where Pillow itself would clip.
        pixels = np.asarray(image)
        low, high = int(pixels.min(initial=0)), int(pixels.max(initial=0))
        if low < 0 or high > 65535:
            raise ValueError(f"pixels of {low} to {high}; expected 0 to 65535: store it as 8 or 16 bits")
        image = Image.fromarray((pixels // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; store it as 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert(MODES[channels])
    return image if size is None else image.resize(size, Image.Resampling.BILINEAR)
