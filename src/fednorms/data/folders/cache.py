"""Keep decoded images on disk, so that every file is decoded once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.data.folders.decode import Prepared, decode
from fednorms.data.folders.scan import ImageFile
from fednorms.data.mapped import MappedImages

_FORMAT = 2  # of the cache: raise it when decoding changes, so that old files are not taken for new ones
_counting: ContextVar[bool] = ContextVar("fednorms_counting", default=False)


@contextmanager
def counted_only() -> Iterator[None]:
    """Within it, no image file is opened: each counts as one black pixel. For looking at what a large folder has."""
    token = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(token)


def read_images(
    root: Path,
    paths: Sequence[Path],
    shape: tuple[int, int, int],
    cache: str | Path | bool | None = None,
    memory_limit: int = 2 * 2**30,
    prepared: Prepared | None = None,
) -> torch.Tensor | MappedImages:
    """Many image files below `root` as uint8 of shape (N, C, H, W), resized and cached as `from_folders` does.

    More than `memory_limit` bytes stay in the cache on disk and are read batch by batch.

    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("L", (9, 5)).save(Path(root, "a.png"))
    ...     read_images(Path(root), [Path(root, "a.png")], (3, 4, 4), cache=False).shape
    torch.Size([1, 3, 4, 4])
    """
    in_memory = len(paths) * int(np.prod(shape)) <= memory_limit
    files = [ImageFile(path, "", "", "", of_data_set=True) for path in paths]
    return load(root, files, shape, True, cache, in_memory, prepared)


def load(
    root: Path,
    files: Sequence[ImageFile],
    shape: tuple[int, ...],
    resize: bool,
    cache: str | Path | bool | None,
    in_memory: bool,
    prepared: Prepared | None = None,
) -> torch.Tensor | MappedImages:
    """The pixels of all files, from the cache if they are there, in memory or mapped from disk."""
    full = (len(files), *shape)
    if _counting.get():
        return torch.zeros(len(files), shape[0], 1, 1, dtype=torch.uint8)
    if cache is False:
        if not in_memory:
            raise BadInput(f"folder {str(root)!r} is larger than memory_limit and needs a cache; set cache=FOLDER")
        return torch.from_numpy(decode(root, files, np.empty(full, np.uint8), resize, prepared))
    path = _cache_folder(cache) / f"{_key(root, files, shape, resize, prepared)}.npy"
    if not _usable(path, full):
        try:
            _write(path, root, files, full, resize, prepared)
        except OSError as problem:
            if not in_memory:
                raise BadInput(
                    f"folder {str(root)!r}: cannot write the cache {str(path.parent)!r} ({problem}), and the "
                    "images exceed memory_limit; set cache=FOLDER to a place with room, or raise memory_limit"
                ) from problem
            warnings.warn(
                f"cannot write the cache {str(path.parent)!r} ({problem}): {len(files)} images are decoded "
                "into memory, now and in every later run until cache=FOLDER can be written",
                stacklevel=3,
            )
            return torch.from_numpy(decode(root, files, np.empty(full, np.uint8), resize, prepared))
    return torch.from_numpy(np.load(path)) if in_memory else MappedImages(path)


def _cache_folder(cache: str | Path | bool | None) -> Path:
    if cache is None or isinstance(cache, bool):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fednorms"
    return Path(cache).expanduser()


def _key(root: Path, files: Sequence[ImageFile], shape: Sequence[int], resize: bool, prepared: Prepared | None) -> str:
    """Changes when a file is added, removed or written to, or when the wanted shape changes."""
    digest = hashlib.blake2b(digest_size=16)
    how = [prepared.name] if prepared else []
    upright = [] if all(file.of_data_set for file in files) else ["upright"]
    digest.update(json.dumps([_FORMAT, str(root.resolve()), list(shape), resize, *how, *upright]).encode())
    for file in files:
        found = file.path.stat()
        # Copies may keep the time of a change, but not the time at which the file was put there.
        when = [found.st_mtime_ns] if file.of_data_set else [found.st_mtime_ns, found.st_ctime_ns]
        line = [file.path.relative_to(root).as_posix(), *when, found.st_size]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def _usable(path: Path, full: tuple[int, ...]) -> bool:
    try:
        stored = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return stored.shape == full and stored.dtype == np.uint8


def _write(
    path: Path,
    root: Path,
    files: Sequence[ImageFile],
    full: tuple[int, ...],
    resize: bool,
    prepared: Prepared | None,
) -> None:
    """Decode into a file of another name, then rename: a cache file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("*.partial"):
        if time.time() - old.stat().st_mtime > 24 * 3600:  # left by a killed process
            old.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as out:
            np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": full})
            offset = out.tell()
            # Reserved at once: a full disk is an error here, and not a crash while the map is written.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(out.fileno(), 0, offset + int(np.prod(full)))
            else:
                out.truncate(offset + int(np.prod(full)))
        images = np.memmap(name, np.uint8, "r+", offset, full)
        decode(root, files, images, resize, prepared)
        images.flush()
        del images
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
