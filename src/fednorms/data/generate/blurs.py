"""Blurs of batches (N, C, H, W) in [0, 1]: Gaussian, disk, motion, zoom and shuffled pixels.

Paper: Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
https://arxiv.org/abs/1903.12261
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Draws = np.random.RandomState


def tensor(values: np.ndarray, like: Tensor) -> Tensor:
    """Convert drawn numbers to the type of the images."""
    return torch.from_numpy(np.asarray(values)).to(like.dtype)


def gaussian(x: Tensor, sigma: float, truncate: float = 4.0, mode: str = "replicate") -> Tensor:
    """Gaussian blur with a kernel of int(truncate sigma + 1/2) pixels to each side.

    >>> x = torch.rand(1, 3, 8, 8)
    >>> torch.equal(gaussian(x, 0.0), x), round(float(gaussian(torch.ones(1, 1, 5, 5), 1.0).mean()), 6)
    (True, 1.0)
    """
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return x
    weights = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(-radius, radius + 1)]
    kernel = torch.tensor(weights, dtype=x.dtype) / sum(weights)
    n, c, h, w = x.shape
    y = pad(x.reshape(n * c, 1, h, w), (radius, radius, 0, 0), mode)
    y = pad(F.conv2d(y, kernel.view(1, 1, 1, -1)), (0, 0, radius, radius), mode)
    return F.conv2d(y, kernel.view(1, 1, -1, 1)).reshape(x.shape)


def pad(x: Tensor, by: Sequence[int], mode: str) -> Tensor:
    """Pad by any width, also wider than the image, step by step.

    >>> pad(torch.arange(3.0).view(1, 1, 1, 3), (4, 0, 0, 0), "reflect").flatten().tolist()
    [0.0, 1.0, 2.0, 1.0, 0.0, 1.0, 2.0]
    """
    left = list(by)
    while any(left):
        room = [x.shape[-1] - 1] * 2 + [x.shape[-2] - 1] * 2 if mode == "reflect" else left
        now = [min(a, max(r, 1)) for a, r in zip(left, room, strict=True)]
        x = F.pad(x, tuple(now), mode=mode)
        left = [a - b for a, b in zip(left, now, strict=True)]
    return x


def defocus(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Convolution with a disk of radius c0, itself smoothed by a 3x3 Gaussian of sigma c1."""
    span = torch.arange(-8.0, 9.0)
    disk = (span.view(-1, 1) ** 2 + span.view(1, -1) ** 2 <= c[0] ** 2).to(x.dtype)
    side = torch.exp(-0.5 * (torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype) / c[1]) ** 2)
    small = torch.outer(side, side) / side.sum() ** 2
    kernel = F.conv2d((disk / disk.sum()).view(1, 1, 17, 17), small.view(1, 1, 3, 3), padding=1)
    n, ch, h, w = x.shape
    return F.conv2d(pad(x.reshape(n * ch, 1, h, w), (8, 8, 8, 8), "reflect"), kernel).reshape(x.shape)


def motion(x: Tensor, radius: float, sigma: float, degrees: np.ndarray) -> Tensor:
    """Mean along a line from each pixel, weights exp(-i^2 / (2 sigma^2)) for i up to 2 radius; one angle per image."""
    steps = int(2 * radius) + 1
    weights = np.exp(-0.5 * (np.arange(steps) / sigma) ** 2)
    weights = weights[weights > 1e-4]  # the rest would not change a pixel
    weights /= weights.sum()
    angle = np.deg2rad(degrees)
    n, _, h, w = x.shape
    rows, columns = torch.arange(h).view(1, -1, 1), torch.arange(w).view(1, 1, -1)
    image = torch.arange(n).view(-1, 1, 1)
    moved_first = x.permute(0, 2, 3, 1)  # pixels as rows of channels
    total = torch.zeros_like(moved_first)
    for i, weight in enumerate(weights):
        right = torch.from_numpy(np.round(i * np.cos(angle)).astype(np.int64)).view(-1, 1, 1)
        down = torch.from_numpy(np.round(i * np.sin(angle)).astype(np.int64)).view(-1, 1, 1)
        total += weight * moved_first[image, (rows + down).clamp(0, h - 1), (columns + right).clamp(0, w - 1)]
    return total.permute(0, 3, 1, 2)


def motion_blur(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Motion blur of radius c0 and sigma c1 at an angle within 45 degrees of horizontal."""
    return motion(x, c[0], c[1], r.uniform(-45, 45, len(x)))


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The middle of each image, enlarged to its size.

    >>> float(zoomed(torch.ones(1, 1, 4, 4), 1.5).mean())
    1.0
    """
    n, _, h, w = x.shape
    ys, xs = (torch.arange(k, dtype=x.dtype).add(0.5).mul(2 / k).sub(1).div(factor) for k in (h, w))
    grid = torch.stack([xs.view(1, -1).expand(h, w), ys.view(-1, 1).expand(h, w)], 2)
    return F.grid_sample(x, grid.expand(n, h, w, 2), padding_mode="border", align_corners=False)


def zoom_blur(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """The mean of x and of its zooms by 1, 1.01, ... up to c0."""
    factors = [1 + i / 100 for i in range(round((c[0] - 1) * 100) + 1)]
    return (x + torch.stack([zoomed(x, f) for f in factors]).sum(0)) / (len(factors) + 1)


def glass_blur(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Blur c0, pass c2 times over the pixels and swap each with one less than c1 + 1 up or left, blur again."""
    sigma, reach, passes = c[0], int(c[1]), int(c[2])
    y = gaussian(x, sigma).permute(2, 3, 0, 1).contiguous()  # H, W, N, C
    h, w, n, _ = y.shape
    every = torch.arange(n)
    for _ in range(passes):
        shift = torch.from_numpy(r.randint(-reach, reach, (2, h, w, n)))
        for row in range(h - reach, reach, -1):
            for column in range(w - reach, reach, -1):
                there = (row + shift[0, row, column], column + shift[1, row, column], every)
                here = y[row, column].clone()
                y[row, column] = y[there]
                y[there] = here
    return gaussian(y.permute(2, 3, 0, 1), sigma)


def gaussian_blur(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Gaussian blur of sigma c0."""
    return gaussian(x, c[0])


reflected = partial(gaussian, truncate=3.0, mode="reflect")
