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
from PIL import Image, UnidentifiedImageError

from fednorms.core.errors import BadInput
from fednorms.core.option_names import flag, option
from fednorms.data.folders.scan import ImageFile
from fednorms.data.mapped import release
from fednorms.data.problems import raise_problems

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF")  # Pillow knows many more, and some start other programs
MOST_PIXELS = 2**26  # of one image: 8192 x 8192
_NAMED = 10  # unreadable files named in one message
_BLOCK = 512  # files decoded before the pages of their images are released


@dataclass(frozen=True)
class Prepared:
    """Custom preparation of an opened image, where resizing is not enough.

    `pixels` returns an image of the wanted size and mode. The name is part of the cache's key. `steps` say the same in
    words, for users of an exported model.
    """

    name: str
    pixels: Callable[[Image.Image], Image.Image]
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decoding:
    """Image files below `root`, and the pixels wanted of each: shape (C, H, W), resized or not, perhaps prepared."""

    root: Path
    files: Sequence[ImageFile]
    shape: tuple[int, int, int]
    resize: bool
    prepared: Prepared | None = None

    @property
    def full(self) -> tuple[int, int, int, int]:
        """The shape of all images together, (N, C, H, W)."""
        return (len(self.files), *self.shape)

    def images(self, out: np.ndarray | None = None) -> np.ndarray:
        """Decode all files, several at a time, into `out` or a new array; report every file that cannot be read."""
        images = np.empty(self.full, np.uint8) if out is None else out
        found: list[_Decoded] = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, len(self.files), _BLOCK):
                here = range(start, min(start + _BLOCK, len(self.files)))
                found += pool.map(self._decode_one, here, images[here.start : here.stop])
                release(images)
        raise_problems(f'Folder "{self.root}"', [*_unreadable(found), *self._other_sizes(found)])
        brightest = [one.brightest for one in found if one.brightest is not None]
        if brightest and max(brightest) < 2**14:
            warnings.warn(
                f'Folder "{self.root}": {len(brightest)} 16-bit images have no pixel above {max(brightest)}, so they '
                "are dark and coarse when scaled to 8 bits. Scale their values to 0 to 65535 first.",
                stacklevel=4,
            )
        return images

    def _decode_one(self, i: int, out: np.ndarray) -> _Decoded:
        channels, height, width = self.shape
        file = self.files[i]
        size, brightest = (height, width), None
        try:
            with open_image(file.path) as stored:
                # The papers' programs ignore EXIF rotation, so published data sets are read as stored.
                image = stored if file.of_data_set else upright(single(stored))
                size = (image.height, image.width)
                if image.mode.startswith("I"):
                    brightest = int(np.asarray(image).max(initial=0))
                if not self.resize and size != (height, width):
                    return _Decoded(size, brightest)
                ready = image if self.prepared is None else self.prepared.pixels(image)
                pixels = np.asarray(converted(ready, channels, (width, height) if self.resize else None))
        except Exception as problem:  # Pillow's decoders raise almost anything on broken files
            return _Decoded(size, brightest, f'"{file.path}" cannot be read: {problem}')
        out[:] = pixels.reshape(height, width, channels).transpose(2, 0, 1)
        return _Decoded(size, brightest)

    def _other_sizes(self, found: Sequence[_Decoded]) -> list[str]:
        wanted = self.shape[1:]
        others = [i for i, one in enumerate(found) if one.size != wanted]
        if self.resize or not others:
            return []
        same = next(i for i, one in enumerate(found) if one.size == wanted)
        (height, width), other = wanted, found[others[0]].size
        return [
            f'images differ in size: "{self.files[same].path}" is {height}x{width} (height x width), '
            f'"{self.files[others[0]].path}" is {other[0]}x{other[1]}; resize them all with '
            f"{option('size')}{'' if option('size').endswith('=') else ' '}{min(*wanted, *other)}"
        ]


@dataclass(frozen=True)
class _Decoded:
    """What was learned from one file: its size, the brightest pixel of a 16-bit image, and why it was not read."""

    size: tuple[int, int]
    brightest: int | None
    problem: str = ""


def _unreadable(found: Sequence[_Decoded]) -> list[str]:
    problems = [one.problem.removesuffix(".") for one in found if one.problem]
    if len(problems) > _NAMED:
        problems[_NAMED:] = [f"and {len(problems) - _NAMED} more that cannot be read"]
    if problems:
        it = "it" if len(problems) == 1 else "them"
        problems[-1] += f". Replace or remove {it}, or leave {it} out with {flag('skip_broken')}"
    return problems


def open_image(path: str | Path) -> Image.Image:
    """Open an image file in one of the six formats, whatever its name; raises before a huge one is decoded.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("1", (9000, 9000)).save(Path(root, "a.png"))
    ...     open_image(Path(root, "a.png"))
    Traceback (most recent call last):
    ValueError: it has 9000 x 9000 pixels, and at most 67,108,864 are read; resize it first
    """
    try:
        image = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        if Path(path).stat().st_size == 0:
            raise ValueError("the file is empty") from None
        raise ValueError("it is not a PNG, JPEG, BMP, TIFF, WebP or GIF image, or is damaged") from None
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise ValueError(
            f"it has {image.width} x {image.height} pixels, and at most {MOST_PIXELS:,} are read; resize it first"
        )
    return image


def read_image(path: str | Path, shape: tuple[int, int, int], prepared: Prepared | None = None) -> torch.Tensor:
    """Read one image file as uint8 of shape (C, H, W), decoded, prepared and resized as in a federation.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("L", (9, 5)).save(Path(root, "a.png"))
    ...     read_image(Path(root, "a.png"), (3, 4, 4)).shape
    torch.Size([3, 4, 4])
    """
    channels, height, width = shape
    if channels not in MODES:
        raise BadInput(f"Image files have 1, 3 or 4 channels, got {channels}.")
    try:
        with open_image(path) as image:
            turned = upright(single(image))
            ready = turned if prepared is None else prepared.pixels(turned)
            size = None if (ready.height, ready.width) == (height, width) else (width, height)
            pixels = np.array(converted(ready, channels, size))
    except Exception as problem:  # Pillow's decoders raise almost anything on broken files
        raise BadInput(f'Image "{path}" cannot be read: {problem}.') from problem
    return torch.from_numpy(np.ascontiguousarray(pixels.reshape(height, width, channels).transpose(2, 0, 1)))


def first_size(files: Sequence[ImageFile]) -> tuple[int, int]:
    """Height and width of the first image that can be opened; the others are reported when decoding."""
    for file in files:
        if size := stored_size(file):
            return size
    raise BadInput(f'None of the {len(files)} images can be read, the first is "{files[0].path}".')


def stored_size(file: ImageFile) -> tuple[int, int] | None:
    """Height and width of an image, without decoding it; None if it cannot be opened."""
    try:
        with open_image(file.path) as image:
            turned = not file.of_data_set and _orientation(image) in (5, 6, 7, 8)  # by a quarter
            return (image.width, image.height) if turned else (image.height, image.width)
    except Exception:  # Pillow's decoders raise almost anything on broken files
        return None


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def single(image: Image.Image) -> Image.Image:
    """Refuse a TIFF of several pages, of which only one would be read; of an animation the first frame is used."""
    if image.format == "TIFF" and (pages := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it has {pages} pages; store each page as a separate image")
    return image


def upright(image: Image.Image) -> Image.Image:
    """Apply the rotation that a camera stored (EXIF)."""
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """How a camera was held (EXIF); 1 is upright."""
    try:
        found: int = image.getexif().get(0x0112, 1)
    except Exception:  # the pixels may be fine where the EXIF data are damaged
        return 1
    return found


def converted(image: Image.Image, channels: int, size: tuple[int, int] | None) -> Image.Image:
    """An image with this many channels of 8 bits, resized to width and height if wanted."""
    if image.mode.startswith("I"):
        # 16-bit gray (X-rays) is scaled to 8 bits; Pillow itself would clip.
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
