"""Flips of images."""

from __future__ import annotations

import torch
from torch import Tensor


def flip(x: Tensor, which: Tensor, axis: int = -1) -> Tensor:
    """Mirror the images that `which` (booleans) names, left-right (axis -1) or top-bottom (axis -2).

    >>> x = torch.arange(2.0).view(1, 1, 1, 2)
    >>> flip(x, torch.tensor([True])).flatten().tolist()
    [1.0, 0.0]
    """
    return torch.where(which.view(-1, 1, 1, 1), x.flip(axis), x)


def draw_choice(u: Tensor, p: float = 0.5) -> Tensor:
    """Which images are chosen, each with probability p.

    >>> draw_choice(torch.tensor([0.2, 0.8])).tolist()
    [True, False]
    """
    return u < p
