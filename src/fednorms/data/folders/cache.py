"""Keep decoded images on disk: every file is decoded once, and again if the cache is damaged."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.paths import given_path
from fednorms.data.folders.cached import CachedImages, checked, hashes_of, length_of_hashes
from fednorms.data.folders.decode import Decoding, Prepared
from fednorms.data.folders.listed import ListedImages
from fednorms.data.folders.scan import ImageFile
from fednorms.data.mapped import MappedImages

MEMORY_LIMIT = 2 * 2**30  # bytes of images that are read into memory; more stay on disk
_OFF = ("off", "no", "none", "false", "0")  # values of FEDNORMS_CACHE that keep nothing
_FORMAT = 2  # raise it when decoding changes: old cache files are then not used
_counting: ContextVar[bool] = ContextVar("fednorms_counting", default=False)


@contextmanager
def counted_only() -> Iterator[None]:
    """Decode no image file within this context: splits hold `ListedImages`. For a look at the files themselves."""
    token = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(token)


def is_counting() -> bool:
    """Whether image files are only listed."""
    return _counting.get()


def read_images(
    root: Path,
    paths: Sequence[Path],
    shape: tuple[int, int, int],
    cache: str | Path | bool | None = None,
    memory_limit: int = MEMORY_LIMIT,
    prepared: Prepared | None = None,
) -> torch.Tensor | MappedImages:
    """Read image files below `root` as uint8 of shape (N, C, H, W), resized and cached as `from_folders` does.

    Above `memory_limit` bytes, images stay in the cache on disk and are read batch by batch.

    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("L", (9, 5)).save(Path(root, "a.png"))
    ...     read_images(Path(root), [Path(root, "a.png")], (3, 4, 4), cache=False).shape
    torch.Size([1, 3, 4, 4])
    """
    files = [ImageFile(path, "", "", "", of_data_set=True) for path in paths]
    return load(Decoding(root, files, shape, True, prepared), cache, memory_limit)


def load(
    wanted: Decoding, cache: str | Path | bool | None = None, memory_limit: int = MEMORY_LIMIT
) -> torch.Tensor | MappedImages:
    """The pixels of all files, taken from the cache if possible; above `memory_limit` bytes they stay on disk."""
    if is_counting():
        return ListedImages(wanted.root, [file.path for file in wanted.files], wanted.shape[0])
    where = f'Folder "{wanted.root}"'
    return kept(where, _key(wanted), wanted.full, wanted.images, cache, memory_limit, str(wanted.root.resolve()))


def kept(
    where: str,
    key: str,
    full: tuple[int, ...],
    fill: Callable[[np.ndarray | None], np.ndarray],
    cache: str | Path | bool | None = None,
    memory_limit: int = MEMORY_LIMIT,
    made_from: str = "",
) -> torch.Tensor | MappedImages:
    """The images that `fill` makes (in an array of its own, or in the one given), made once for every `key`.

    `made_from` is the folder of the originals, for those who list the cache.
    """
    in_memory = math.prod(full) <= memory_limit
    folder = cache_folder(cache)
    if folder is None:
        if not in_memory:
            raise BadInput(
                f"{where} exceeds memory_limit and needs a cache. Set cache=FOLDER, or the environment variable "
                "FEDNORMS_CACHE to a folder."
            )
        return torch.from_numpy(fill(None))
    path = folder / f"{key}.npy"
    found = _read(path, full, in_memory)
    if found is None:
        try:
            _write(path, full, fill)
            with replaced(path.with_suffix(".json")) as file:
                file.write(json.dumps({"from": made_from, "shape": full}).encode("ascii"))
            found = _read(path, full, in_memory)
        except OSError as problem:
            if not in_memory:
                raise BadInput(
                    f'{where}: cannot write the cache "{path.parent}" ({problem}), and the images exceed memory_limit. '
                    "Set cache=FOLDER to a place with enough room, or raise memory_limit."
                ) from problem
            warnings.warn(
                f'Cannot write the cache "{path.parent}" ({problem}). {full[0]} images are decoded into '
                "memory, now and in every later run until cache=FOLDER can be written.",
                stacklevel=3,
            )
            return torch.from_numpy(fill(None))
    if found is None:
        raise BadInput(f'The cache "{path}" cannot be read back. Set cache=FOLDER to another disk.')
    return found


def cache_folder(cache: str | Path | bool | None = None) -> Path | None:
    """The folder for decoded images; None if nothing is to be kept.

    The environment variable FEDNORMS_CACHE names another folder than the user's cache folder, or is "off".

    >>> cache_folder(False) is None, cache_folder("/tmp/images")
    (True, PosixPath('/tmp/images'))
    """
    if cache is False:
        return None
    if cache is not None and cache is not True:
        return given_path("cache", cache)
    chosen = os.environ.get("FEDNORMS_CACHE", "")
    if chosen.lower() in _OFF:
        return None
    return (
        Path(chosen).expanduser()
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fednorms"
    )


def _key(wanted: Decoding) -> str:
    """A hash that changes when a file is added, removed or written to, or when other pixels are wanted."""
    digest = hashlib.blake2b(digest_size=16)
    how = [wanted.prepared.name] if wanted.prepared else []
    upright = [] if all(file.of_data_set for file in wanted.files) else ["upright"]
    head = [_FORMAT, str(wanted.root.resolve()), list(wanted.shape), wanted.resize, *how, *upright]
    digest.update(json.dumps(head).encode())
    for file in wanted.files:
        found = file.path.stat()
        # A copy may keep the modification time, but its status change time is new.
        when = [found.st_mtime_ns] if file.of_data_set else [found.st_mtime_ns, found.st_ctime_ns]
        line = [file.path.relative_to(wanted.root).as_posix(), *when, found.st_size]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def _read(path: Path, full: tuple[int, ...], in_memory: bool) -> torch.Tensor | MappedImages | None:
    """The images of a cache file; None if it is missing, of another kind or damaged."""
    try:
        stored = np.load(path, mmap_mode=None if in_memory else "r")
        if stored.shape != full or stored.dtype != np.uint8:
            return None
        if not in_memory:
            return CachedImages(path)
        if (blocks := checked(path, stored)) is None:
            return None
        blocks.check_all()
    except Exception:  # whatever NumPy raises for a damaged header, and what we raise for damaged data
        return None
    return torch.from_numpy(stored)


def _write(path: Path, full: tuple[int, ...], fill: Callable[[np.ndarray | None], np.ndarray]) -> None:
    """Fill a file of another name, then rename it: a cache file is either complete or absent."""
    with replaced(path) as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": full})
        offset, size = out.tell(), math.prod(full)
        # Reserve all of it now: a full disk is then an error here instead of a crash while the map is written.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, offset + size + length_of_hashes(size))
        else:
            out.truncate(offset + size + length_of_hashes(size))
        out.flush()
        images = np.memmap(out.name, np.uint8, "r+", offset, full)
        fill(images)
        images.flush()
        out.seek(offset + size)
        out.write(hashes_of(images))
        del images


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file of another name that gets this name if all goes well; otherwise it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("*.partial"):
        if time.time() - old.stat().st_mtime > 24 * 3600:  # left by a killed process
            old.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial")
    try:
        os.close(handle)
        with open(name, "r+b") as out:
            yield out
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
