"""Rotations, translations, scalings and shears, as one resampling."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Interpolation = Literal["nearest", "bilinear"]
Border = Literal["zeros", "border", "reflection"]


def affine(
    x: Tensor,
    degrees: Tensor,
    right: Tensor,
    down: Tensor,
    scale: Tensor,
    shear: Tensor,
    interpolation: Interpolation = "nearest",
    border: Border = "zeros",
) -> Tensor:
    """Rotate clockwise about the center, scale, shear along x (degrees), then move (pixels); each (N,).

    With R the rotation and S the shear, the output at p is the input at (R S)^-1 (p - t) / scale; the same as
    torchvision's `affine`. Outside the image is black, unless `border` says otherwise.

    >>> one, nil = torch.ones(1), torch.zeros(1)
    >>> x = torch.arange(9.0).view(1, 1, 3, 3)
    >>> affine(x, nil, one, nil, one, nil).flatten().tolist()
    [0.0, 0.0, 1.0, 0.0, 3.0, 4.0, 0.0, 6.0, 7.0]
    """
    turn, skew = degrees * (math.pi / 180), shear * (math.pi / 180)
    cos, sin, tan = turn.cos(), turn.sin(), skew.tan()
    # (R S)^-1 of R = [[cos, -sin], [sin, cos]] and S = [[1, -tan], [0, 1]]; its determinant is 1.
    inverse = torch.stack([cos - sin * tan, sin + cos * tan, -sin, cos], 1).view(-1, 2, 2) / scale.view(-1, 1, 1)
    height, width = x.shape[-2:]
    ys = torch.arange(height, dtype=x.dtype, device=x.device) + (0.5 - height / 2)
    xs = torch.arange(width, dtype=x.dtype, device=x.device) + (0.5 - width / 2)
    px, py = xs.view(1, 1, -1) - right.view(-1, 1, 1), ys.view(1, -1, 1) - down.view(-1, 1, 1)
    m = inverse.view(-1, 4, 1, 1)
    sx, sy = m[:, 0] * px + m[:, 1] * py, m[:, 2] * px + m[:, 3] * py
    grid = torch.stack([sx * (2 / width), sy * (2 / height)], 3)
    return F.grid_sample(x, grid, mode=interpolation, padding_mode=border, align_corners=False)


def rotate(x: Tensor, degrees: Tensor, interpolation: Interpolation = "nearest", border: Border = "zeros") -> Tensor:
    """Rotate counter-clockwise about the center, as torchvision's `rotate` does.

    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> rotate(x, torch.tensor([90.0])).flatten().tolist()
    [1.0, 3.0, 0.0, 2.0]
    """
    nil = torch.zeros_like(degrees)
    return affine(x, -degrees, nil, nil, nil + 1, nil, interpolation, border)


def between(u: Tensor, low: float, high: float) -> Tensor:
    """Uniforms in (0, 1) stretched to (low, high).

    >>> between(torch.tensor([0.25]), -30.0, 30.0)
    tensor([-15.])
    """
    return low + (high - low) * u
