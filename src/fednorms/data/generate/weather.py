"""Fog, frost, snow and spatter over images (N, 3, H, W) in [0, 1].

Paper: Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
https://arxiv.org/abs/1903.12261
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednorms.data.generate.blurs import Draws, gaussian, motion, tensor, zoomed
from fednorms.data.generate.tones import gray


def plasma(count: int, side: int, decay: float, r: Draws, like: Tensor) -> Tensor:
    """Fractal clouds in [0, 1] of shape (count, 1, side, side), by midpoint displacement on a torus.

    A point between those of a coarse grid is the mean of its four neighbors plus a uniform number, whose range
    shrinks by decay^2 each time the grid gets twice as fine.

    >>> p = plasma(2, 8, 2.0, Draws(0), torch.zeros(1))
    >>> tuple(p.shape), float(p.min()), float(p.max())
    ((2, 1, 8, 8), 0.0, 1.0)
    """
    size = 1 << max(1, (side - 1).bit_length())
    field = torch.zeros(count, size, size, dtype=like.dtype)
    step, spread = size, 1.0

    def wobbled(total: Tensor) -> Tensor:
        return total / 4 + spread * tensor(r.uniform(-1, 1, tuple(total.shape)), like)

    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        square = corners + corners.roll(-1, 1)
        field[:, half::step, half::step] = wobbled(square + square.roll(-1, 2))
        middles, corners = field[:, half::step, half::step], field[:, ::step, ::step]
        field[:, ::step, half::step] = wobbled(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        field[:, half::step, ::step] = wobbled(middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step, spread = half, spread / decay**2
    field = field - field.amin((1, 2), keepdim=True)
    return (field / field.amax((1, 2), keepdim=True)).unsqueeze(1)[..., :side, :side]


def _clouds(x: Tensor, decay: float, r: Draws) -> Tensor:
    h, w = x.shape[-2:]
    return plasma(len(x), max(h, w), decay, r, x)[..., :h, :w]


def fog(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Add c0 plasma(c1), scaled back by max / (max + c0) with the largest value of each image."""
    most = x.amax((1, 2, 3), keepdim=True)
    return (x + c[0] * _clouds(x, c[1], r)) * most / (most + c[0])


def frost(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """c0 x + c1 frost. The published photographs of frost cannot be shipped; bluish ridges of plasma replace them."""
    ridges = (1 - (2 * _clouds(x, 1.4, r) - 1).abs() * 4).clamp(0, 1) * 0.6 + _clouds(x, 1.8, r) * 0.4
    tint = torch.tensor([0.85, 0.93, 1.0], dtype=x.dtype).view(1, 3, 1, 1)
    return c[0] * x + c[1] * ridges * tint


def snow(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Whiten by c6 and add flakes: N(c0, c1^2), zoomed c2, zero below c3, blurred in falling direction; twice."""
    n, _, h, w = x.shape
    flakes = zoomed(c[0] + c[1] * tensor(r.standard_normal((n, 1, h, w)), x), c[2])
    flakes = torch.where(flakes < c[3], torch.zeros_like(flakes), flakes).clamp(0, 1)
    flakes = motion(flakes, c[4], c[5], r.uniform(-135, -45, n))
    white = c[6] * x + (1 - c[6]) * torch.maximum(x, gray(x) * 1.5 + 0.5)
    return white + flakes + flakes.rot90(2, (2, 3))


def spatter(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Drops on the lens where N(c0, c1^2), blurred c2, is above c3: mud (c5 = 1) or water (c5 = 0, approximate)."""
    n, _, h, w = x.shape
    layer = gaussian(c[0] + c[1] * tensor(r.standard_normal((n, 1, h, w)), x), c[2])
    layer = torch.where(layer < c[3], torch.zeros_like(layer), layer)
    if c[5]:
        mask = gaussian((layer > c[3]).to(x.dtype), c[4])
        mask = torch.where(mask < 0.8, torch.zeros_like(mask), mask)
        return x * (1 - mask) + mask * _color((63, 42, 20), x)
    inside = (layer > 0).to(x.dtype)
    # A drop is bright at its edge: what a blur of its outline takes away.
    edge = inside * (1 - gaussian(inside, 1.0)) * layer
    edge = edge / edge.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return x + edge * c[4] * _color((175, 238, 238), x)


def _color(rgb: tuple[int, int, int], like: Tensor) -> Tensor:
    return torch.tensor(rgb, dtype=like.dtype).view(1, 3, 1, 1) / 255
