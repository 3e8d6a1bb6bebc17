"""Arrays of small images, enlarged: in memory, or in the cache on disk if they are too large for that."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from fednorms.data.folders.cache import is_counting, kept
from fednorms.data.mapped import MappedImages, release
from fednorms.data.readers.digits_five import as_rgb
from fednorms.data.readers.pictures import Cache

_BLOCK = 1000  # images that are enlarged at once
_FORMAT = 1  # raise it when enlarging changes: old cache files are then not used


def enlarged(
    where: str, splits: Mapping[str, np.ndarray], size: int, cache: Cache, memory_limit: int, made_from: str = ""
) -> dict[str, torch.Tensor | MappedImages]:
    """Images of N,H,W,C as N,3,size,size; above `memory_limit` bytes in all they stay in the cache on disk.

    >>> enlarged("x", {"train": np.zeros((2, 4, 4, 3), np.uint8)}, 8, False, 1000)["train"].shape
    torch.Size([2, 3, 8, 8])
    """
    total = sum(len(x) for x in splits.values()) * 3 * size * size
    if is_counting() or total <= memory_limit:
        pixels = {part: x.shape[1] if is_counting() else size for part, x in splits.items()}
        return {part: torch.from_numpy(as_rgb(x, pixels[part])) for part, x in splits.items()}
    return {part: _on_disk(f"{where}, {part}", x, size, cache, made_from) for part, x in splits.items()}


def _on_disk(where: str, x: np.ndarray, size: int, cache: Cache, made_from: str) -> torch.Tensor | MappedImages:
    full = (len(x), 3, size, size)
    digest = hashlib.blake2b(np.ascontiguousarray(x).data, digest_size=16, person=b"%d %d" % (_FORMAT, size))

    def fill(out: np.ndarray | None) -> np.ndarray:
        images = np.empty(full, np.uint8) if out is None else out
        for start in range(0, len(x), _BLOCK):
            images[start : start + _BLOCK] = as_rgb(x[start : start + _BLOCK], size)
            release(images)
        return images

    return kept(where, digest.hexdigest(), full, fill, cache, memory_limit=0, made_from=made_from)
