"""Look at every image file once: can it be read, how large is it, what does it show; kept on disk by file and time."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fednorms.data.folders.cache import cache_folder, replaced
from fednorms.data.folders.decode import converted, open_image, single, upright

Progress = Callable[[int, int], None]
_FORMAT = 1  # raise it when `Look` changes: what was stored is then not used
_SIDE = 16  # pixels of a thumbnail
_EVERY = 64  # images between two calls of `progress`


@dataclass(frozen=True)
class Look:
    """What one image shows, or why it cannot be read (`problem`).

    `pixels` is a hash of its colors, equal for exact copies. `outline` has a bit for each of 8 x 8 places of the gray
    image: whether it gets brighter to the right (dHash). `thumbnail` is the gray image as 16 x 16 bytes in base64.
    """

    problem: str = ""
    height: int = 0
    width: int = 0
    mode: str = ""
    pixels: str = ""
    outline: int = 0
    thumbnail: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def gray(self) -> np.ndarray:
        """The thumbnail's 256 gray values."""
        return np.frombuffer(base64.b64decode(self.thumbnail), np.uint8)


def look_at(image: Image.Image, mode: str = "") -> Look:
    """Look at an opened image.

    >>> look = look_at(Image.new("RGB", (4, 2), (255, 0, 0)))
    >>> (look.height, look.width), look.mode, look.mean
    ((2, 4), 'RGB', (1.0, 0.0, 0.0))
    """
    colors = converted(image, 3, None)
    pixels = np.asarray(colors)
    gray = colors.convert("L")
    steps = np.asarray(gray.resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = np.packbits(steps[:, 1:] > steps[:, :-1])
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16, person=b"%dx%d" % image.size)
    unit = pixels.reshape(-1, 3) / 255
    return Look(
        height=image.height,
        width=image.width,
        mode=mode or image.mode,
        pixels=digest.hexdigest(),
        outline=int.from_bytes(bits.tobytes(), "big"),
        thumbnail=base64.b64encode(gray.resize((_SIDE, _SIDE), Image.Resampling.BOX).tobytes()).decode(),
        mean=tuple(round(float(v), 5) for v in unit.mean(0)),
        std=tuple(round(float(v), 5) for v in unit.std(0)),
    )


def look_at_file(path: Path) -> Look:
    """Look at an image file as it would be decoded."""
    try:
        with open_image(path) as stored:
            return look_at(upright(single(stored)), stored.mode)
    except Exception as problem:  # Pillow's decoders raise almost anything on broken files
        return Look(str(problem) or type(problem).__name__)


def looks(
    root: Path, paths: Sequence[Path], cache: str | Path | bool | None = None, progress: Progress | None = None
) -> list[Look]:
    """Look at image files below `root`, several at a time; files that did not change since are taken from the cache.

    An interrupted call keeps what it has seen.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     Path(folder, "a.png").touch()
    ...     looks(Path(folder), [Path(folder, "a.png")], cache=False)[0].problem
    'the file is empty'
    """
    folder = cache_folder(cache)
    store = None if folder is None else folder / f"{_name(root)}.looks.json"
    known = {} if store is None else _stored(store)
    keys = [_key(root, path) for path in paths]
    new = [i for i, key in enumerate(keys) if key not in known]
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for done, (i, look) in enumerate(zip(new, pool.map(lambda i: look_at_file(paths[i]), new), strict=True), 1):
                known[keys[i]] = look
                if progress and (done % _EVERY == 0 or done == len(new)):
                    progress(len(paths) - len(new) + done, len(paths))
    finally:
        if new and store is not None:
            _keep(store, root, known)
    return [known[key] for key in keys]


def _name(root: Path) -> str:
    return hashlib.blake2b(str(root.resolve()).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _key(root: Path, path: Path) -> str:
    """A file, and when it was last changed."""
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
    try:
        found = path.stat()
    except OSError:
        return f"{name} is gone"
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {name}"


def _stored(store: Path) -> dict[str, Look]:
    """What is stored; nothing if it is missing, damaged or of another version."""
    try:
        values = json.loads(store.read_bytes())
        if values["format"] != _FORMAT:
            return {}
        return {key: _look(row) for key, row in values["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _look(row: list[Any]) -> Look:
    named = dict(zip(Look.__dataclass_fields__, row, strict=True))
    return Look(**named | {"mean": tuple(named["mean"]), "std": tuple(named["std"])})


def _keep(store: Path, root: Path, known: dict[str, Look]) -> None:
    kept = {key: astuple(look) for key, look in known.items() if "is gone" not in key}
    values = {"format": _FORMAT, "from": str(root.resolve()), "files": kept}
    with suppress(OSError), replaced(store) as file:  # without a place for it, everything is looked at again next time
        file.write(json.dumps(values).encode("ascii"))
