"""Images that are known by their files only: nothing is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorms.data.mapped import MappedImages


class ListedImages(MappedImages):
    """Image files in place of their pixels: each looks like one black pixel.

    >>> listed = ListedImages(Path("/data"), [Path("/data/a.png"), Path("/data/b.png")], 3)
    >>> listed.take([1]).files, tuple(listed.shape)
    ([PosixPath('/data/b.png')], (2, 3, 1, 1))
    """

    def __init__(self, root: Path, paths: Sequence[Path], channels: int) -> None:
        """List the files below `root`."""
        self.path = root
        self.paths = list(paths)
        self.rows = np.arange(len(self.paths))
        self._array = np.zeros((1, channels, 1, 1), np.uint8)

    @property
    def files(self) -> list[Path]:
        """The files of these rows, in order."""
        return [self.paths[i] for i in self.rows]

    def __getitem__(self, indices: Sequence[int] | np.ndarray | slice | Tensor) -> Tensor:
        """Black pixels."""
        wanted = self.rows[indices.cpu().numpy() if isinstance(indices, Tensor) else indices]
        return torch.zeros(len(wanted), *self._array.shape[1:], dtype=torch.uint8)
