"""Crops of padded images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Fill = float | Sequence[float]


def crop(x: Tensor, top: Tensor, left: Tensor, size: Sequence[int], padding: int = 0, fill: Fill = 0.0) -> Tensor:
    """Of each image, padded by `padding` pixels of color `fill`, the window of `size` at (top, left).

    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> crop(x, torch.tensor([0]), torch.tensor([1]), (2, 2), padding=1)
    tensor([[[[0., 0.],
              [0., 1.]]]])
    """
    color = color_of(fill, x)
    padded = F.pad(x - color, (padding,) * 4) + color if padding else x
    rows = top.view(-1, 1) + torch.arange(size[0], device=x.device)
    columns = left.view(-1, 1) + torch.arange(size[1], device=x.device)
    image = torch.arange(len(x), device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(x.shape[1], device=x.device).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def draw_crop(u: Tensor, shape: Sequence[int], size: Sequence[int], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Places (top, left) of windows, all equally likely, from uniforms u of shape (..., 2).

    >>> [t.tolist() for t in draw_crop(torch.tensor([[0.0, 0.99]]), (8, 8), (8, 8), padding=4)]
    [[0], [8]]
    """
    free = [n + 2 * padding - s for n, s in zip(shape[-2:], size, strict=True)]
    # A number in (0, 1) times k + 1 can still round to k + 1.
    return tuple((u[..., i] * (k + 1)).long().clamp(max=k) for i, k in enumerate(free))  # type: ignore[return-value]


def center_crop(x: Tensor, size: Sequence[int]) -> Tensor:
    """The window of `size` in the middle, one pixel to the top left where the middle is not unique.

    >>> center_crop(torch.arange(9).view(1, 1, 3, 3), (1, 1)).item()
    4
    """
    top, left = ((n - s) // 2 for n, s in zip(x.shape[-2:], size, strict=True))
    return x[..., top : top + size[0], left : left + size[1]]


def color_of(fill: Fill, x: Tensor) -> Tensor | float:
    """A color as a tensor that adds to images; its mean for images with another number of channels.

    >>> color_of((0.2, 0.4, 0.6), torch.zeros(1, 1, 2, 2))
    0.4...
    """
    if isinstance(fill, (int, float)):
        return float(fill)
    if len(fill) != x.shape[1]:
        return sum(fill) / len(fill)
    # Made on the device from numbers: a captured graph must not copy from the host.
    return torch.stack([torch.full((1, 1), v, dtype=x.dtype, device=x.device) for v in fill])
