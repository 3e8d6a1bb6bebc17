"""Squares of one color over an image.

Paper: DeVries, Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, arXiv 2017,
https://arxiv.org/abs/1708.04552
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednorms.transforms.crop import Fill, color_of


def cutout(x: Tensor, row: Tensor, column: Tensor, side: int, fill: Fill = 0.0) -> Tensor:
    """Cover rows row - side/2 to row + side/2 - 1, and the same columns, inside the image.

    Centers have the shape (N,), or (N, K) for K squares per image.

    >>> cutout(torch.ones(1, 1, 3, 4), torch.tensor([0]), torch.tensor([2]), 2)
    tensor([[[[1., 0., 0., 1.],
              [1., 1., 1., 1.],
              [1., 1., 1., 1.]]]])
    """
    rows = torch.arange(x.shape[-2], device=x.device) - row.view(len(x), -1, 1)
    columns = torch.arange(x.shape[-1], device=x.device) - column.view(len(x), -1, 1)
    half = side // 2
    rows, columns = (rows >= -half) & (rows < half), (columns >= -half) & (columns < half)
    covered = (rows.unsqueeze(3) & columns.unsqueeze(2)).any(1, keepdim=True)
    return torch.where(covered, torch.zeros_like(x) + color_of(fill, x), x)


def draw_center(u: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw a pixel of the image, all equally likely, from uniforms u of shape (N, 2).

    >>> [t.item() for t in draw_center(torch.tensor([[0.5, 0.99]]), (4, 4))]
    [2, 3]
    """
    row, column = ((u[:, i] * n).long().clamp(max=n - 1) for i, n in enumerate(shape[-2:]))
    return row, column
