"""Hashes of the blocks of a large file: each block is checked the first time that something in it is read.

Checking costs one pass over what is read, once per process; opening costs nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SIZE = 2**18  # bytes of a block
DIGEST = 16  # bytes of a hash


class BlockHasher:
    """Hashes what is appended, block by block.

    >>> hasher = BlockHasher()
    >>> hasher.append(bytes(SIZE + 1))
    >>> len(hasher.table()) == 2 * DIGEST
    True
    """

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._open, self._filled = _hasher(), 0

    def append(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        rest = memoryview(data)
        while len(rest):
            now, rest = rest[: SIZE - self._filled], rest[SIZE - self._filled :]
            self._open.update(now)
            self._filled += len(now)
            if self._filled == SIZE:
                self._digests.append(self._open.digest())
                self._open, self._filled = _hasher(), 0

    def table(self) -> bytes:
        """The hashes of all blocks, one after the other; the last block may be short."""
        return b"".join([*self._digests, *([self._open.digest()] if self._filled else [])])


class CheckedBlocks:
    """Bytes with the hashes of their blocks; raises `damaged(block)` for a block whose hash differs.

    >>> data = np.arange(10, dtype=np.uint8)
    >>> hasher = BlockHasher()
    >>> hasher.append(data.tobytes())
    >>> CheckedBlocks(data, hasher.table(), lambda block: ValueError(block)).check(np.array([2]), np.array([4]))
    """

    def __init__(self, data: np.ndarray, table: bytes, damaged: Callable[[int], Exception]) -> None:
        self._data, self._damaged = data, damaged
        self._table = np.frombuffer(table, dtype=np.uint8).reshape(-1, DIGEST)
        if len(self._table) != -(-len(data) // SIZE):
            raise damaged(0)
        self._open = np.ones(len(self._table), dtype=bool)  # not yet checked
        self._done = not len(self._table)

    def check(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Check the blocks of these ranges of bytes, as far as no earlier call has."""
        if self._done:
            return
        first, last = starts // SIZE, np.maximum(ends - 1, starts) // SIZE
        for extra in range(int((last - first).max(initial=-1)) + 1):
            inside = (first + extra)[first + extra <= last]
            for block in np.unique(inside[self._open[inside]]):
                self._check_one(int(block))
                self._done = not self._open.any()

    def check_all(self) -> None:
        """Check every block, several at a time."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(self._check_one, np.flatnonzero(self._open).tolist()))

    def _check_one(self, block: int) -> None:
        found = _hasher()
        found.update(self._data[block * SIZE : (block + 1) * SIZE].data)
        if found.digest() != self._table[block].tobytes():
            raise self._damaged(block)
        self._open[block] = False


def hash_of(data: bytes) -> str:
    """The hash of some bytes, as text."""
    made = _hasher()
    made.update(data)
    return made.hexdigest()


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST)
