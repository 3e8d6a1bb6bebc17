"""A file of the image cache: a .npy array, followed by the hashes of its blocks and the hash of those."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.data.blocks import DIGEST, SIZE, BlockHasher, CheckedBlocks, hash_of
from fednorms.data.mapped import HELD, MappedImages, release


def length_of_hashes(size: int) -> int:
    """The bytes of hashes behind an array of `size` bytes.

    >>> length_of_hashes(SIZE + 1)
    48
    """
    return (-(-size // SIZE) + 1) * DIGEST


def hashes_of(array: np.ndarray) -> bytes:
    """The hashes that follow an array in its file."""
    flat = array.reshape(-1)

    def one(start: int) -> bytes:
        hasher = BlockHasher()
        hasher.append(flat[start : start + SIZE].data)
        if start % HELD == 0:
            release(flat)
        return hasher.table()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        table = b"".join(pool.map(one, range(0, len(flat), SIZE)))
    return table + bytes.fromhex(hash_of(table))


def checked(path: Path, array: np.ndarray) -> CheckedBlocks | None:
    """The blocks of an array that was read from `path`; None if the file has no hashes or these are damaged."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        offset = file.tell() - length_of_hashes(array.size)
        if offset < array.size:
            return None
        file.seek(offset)
        table = file.read()
    if bytes.fromhex(hash_of(table[:-DIGEST])) != table[-DIGEST:]:
        return None
    return CheckedBlocks(array.reshape(-1), table[:-DIGEST], lambda _: damaged(path))


def damaged(path: Path) -> BadInput:
    """The error for a damaged file of the cache, which is removed: it will be made again."""
    path.unlink(missing_ok=True)
    return BadInput(
        f'The image cache "{path}" is damaged (its content hash differs) and was removed. Run the same command again: '
        "it decodes the images anew."
    )


class CachedImages(MappedImages):
    """Images that stay in a file of the cache; each block is checked when it is first read."""

    def __init__(self, path: str | Path, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Map `path`; `rows` selects and orders its images (all of them by default)."""
        super().__init__(path, rows)
        self._row = int(np.prod(self._array.shape[1:]))
        found = checked(self.path, self._array)
        if found is None:
            raise damaged(self.path)
        self._checked = found

    def __getitem__(self, indices: Sequence[int] | np.ndarray | slice | Tensor) -> Tensor:
        """The images at `indices` as a tensor in memory, after checking their blocks."""
        wanted = np.atleast_1d(self.rows[indices.cpu().numpy() if isinstance(indices, Tensor) else indices])
        self._checked.check(wanted * self._row, (wanted + 1) * self._row)
        return super().__getitem__(indices)
