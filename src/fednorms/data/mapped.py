"""Images that stay on disk: rows of a memory-mapped .npy file, read when a batch asks for them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE = 4096  # bytes of an image from which on a thread reads ahead
HELD = 2**26  # bytes of a mapped file that are used before its pages are released


def release(array: np.ndarray) -> None:
    """Remove the pages of a mapped file from this process; the system keeps them as long as it has room.

    Without this, a process seems to need as much memory as it has read.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)


class MappedImages:
    """Some rows of a uint8 .npy file of shape (N, C, H, W); it behaves like a tensor in a `Split`.

    Only the path and the row numbers are pickled, so it is cheap to send to a worker process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "x.npy"
    ...     np.save(path, np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2))
    ...     x = MappedImages(path, [2, 0])
    ...     tuple(x.shape), x[[1]].flatten().tolist()
    ((2, 1, 2, 2), [0, 1, 2, 3])
    """

    def __init__(self, path: str | Path, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Map `path`; `rows` selects and orders its images (all of them by default)."""
        self.path = Path(path)
        self._array: np.ndarray = np.load(self.path, mmap_mode="r")
        self.rows = np.arange(len(self._array)) if rows is None else np.asarray(rows, dtype=np.int64)
        self._used = 0  # bytes since pages were released

    @property
    def shape(self) -> torch.Size:
        """(rows, C, H, W)."""
        return torch.Size((len(self.rows), *self._array.shape[1:]))

    @property
    def ndim(self) -> int:
        """Four, for images."""
        return self._array.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensors that indexing returns."""
        return torch.from_numpy(np.empty(0, self._array.dtype)).dtype

    @property
    def slow(self) -> bool:
        """Whether reading a batch takes long enough to be worth a thread that reads ahead."""
        return self._array[:1].nbytes >= LARGE

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: Sequence[int] | np.ndarray | slice | Tensor) -> Tensor:
        """The images at `indices` (a sequence, slice or integer tensor) as a tensor in memory."""
        if isinstance(indices, Tensor):
            indices = indices.cpu().numpy()
        wanted = self.rows[indices]
        # Reading in file order is faster; fancy indexing copies, so the tensor is writable.
        order = np.argsort(wanted, kind="stable")
        images = np.empty((len(wanted), *self._array.shape[1:]), self._array.dtype)
        images[order] = self._array[wanted[order]]
        self._used += images.nbytes
        if self._used > HELD:
            release(self._array)
            self._used = 0
        return torch.from_numpy(images)

    def take(self, indices: Sequence[int] | np.ndarray) -> MappedImages:
        """Fewer rows of the same file, nothing read."""
        return self.select(self.rows[indices])

    def select(self, rows: np.ndarray) -> MappedImages:
        """These rows of the same file, nothing read; `rows` count in the file, not in the present selection."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.rows = rows
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "rows": self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["rows"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {tuple(self.shape)})"
