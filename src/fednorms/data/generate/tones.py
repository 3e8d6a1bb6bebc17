"""Noise and color changes, pixel by pixel, of images (N, C, H, W) in [0, 1].

Paper: Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
https://arxiv.org/abs/1903.12261
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednorms.data.generate.blurs import Draws, tensor


def gaussian_noise(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Add N(0, c0^2)."""
    return x + c[0] * tensor(r.standard_normal(tuple(x.shape)), x)


def shot_noise(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Poisson(c0 x) / c0."""
    return tensor(r.poisson(x.double().numpy() * c[0]), x) / c[0]


def impulse_noise(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """A fraction c0 of the values becomes 0 or 1."""
    u = tensor(r.random_sample(tuple(x.shape)), x)
    return torch.where(u < c[0], (u < c[0] / 2).to(x.dtype), x)


def speckle_noise(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Add x N(0, c0^2)."""
    return x + x * c[0] * tensor(r.standard_normal(tuple(x.shape)), x)


def brightness(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """The value of HSV plus c0, hue and saturation kept."""
    value = x.amax(1, keepdim=True)
    more = (value + c[0]).clamp(0, 1)
    return torch.where(value > 0, x * more / value.clamp(min=1e-12), more)


def contrast(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """(x - mean) c0 + mean, with the mean of each image and channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * c[0] + mean


def saturate(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """The saturation of HSV times c0 plus c1, hue and value kept; gray counts as red."""
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    saturation = (value - low) / value.clamp(min=1e-12)
    more = (saturation * c[0] + c[1]).clamp(0, 1)
    colored = value - (value - x) * more / saturation.clamp(min=1e-12)
    red = torch.tensor([0.0, 1.0, 1.0], dtype=x.dtype).view(1, 3, 1, 1)
    return torch.where(saturation > 0, colored, value * (1 - more * red))


def gray(x: Tensor) -> Tensor:
    """Luminance (one channel).

    >>> round(float(gray(torch.ones(1, 3, 1, 1))), 6)
    1.0
    """
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype).view(1, 3, 1, 1)
    return (x * weights).sum(1, keepdim=True)
