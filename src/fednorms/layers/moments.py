"""Means and variances over the axes that normalisation layers use, shared by the layers beside this file."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """`x`, in float32 where it is a 16-bit tensor: statistics of halves overflow and lose their small
    differences.

    >>> widened(torch.zeros(1, dtype=torch.float16)).dtype, widened(torch.zeros(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.float() if x.dtype in _HALF else x


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """A vector of C channel values, shaped to broadcast against `x` of shape (N, C, ...).

    >>> per_channel(torch.ones(3), torch.zeros(2, 3, 4, 4)).shape
    torch.Size([1, 3, 1, 1])
    """
    return v.reshape(1, -1, *[1] * (x.dim() - 2))


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of `x` (N, C, ...), over samples and positions.

    >>> batch_moments(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    (tensor([2., 2.]), tensor([1., 0.]))
    """
    axes = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(widened(x), dim=axes, correction=0)
    return mean, var


def instance_moments(x: Tensor, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance of shape (N, C) over positions only; one position has variance 0.

    >>> instance_moments(torch.tensor([[[1.0, 3.0]]]), unbiased=True)
    (tensor([[2.]]), tensor([[2.]]))
    """
    flat = widened(x).reshape(x.shape[0], x.shape[1], -1)
    correction = int(unbiased and flat.shape[2] > 1)
    var, mean = torch.var_mean(flat, dim=2, correction=correction)
    return mean, var


def group_moments(x: Tensor, groups: int, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance per sample and group of channels, repeated to shape (N, C).

    >>> mean, var = group_moments(torch.tensor([[1.0, 3.0, 5.0, 5.0]]), groups=2)
    >>> mean, var
    (tensor([[2., 2., 5., 5.]]), tensor([[1., 1., 0., 0.]]))
    """
    flat = widened(x).reshape(x.shape[0], groups, -1)
    correction = int(unbiased and flat.shape[2] > 1)
    var, mean = torch.var_mean(flat, dim=2, correction=correction)

    def to_channels(v: Tensor) -> Tensor:
        return v[:, :, None].expand(-1, -1, x.shape[1] // groups).reshape(x.shape[0], x.shape[1])

    return to_channels(mean), to_channels(var)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The affine map y = gamma * x + beta per channel; None leaves a factor or an offset out.

    >>> affine(torch.ones(1, 2), torch.tensor([2.0, 3.0]), None)
    tensor([[2., 3.]])
    """
    if weight is not None:
        x = x * per_channel(weight, x)
    if bias is not None:
        x = x + per_channel(bias, x)
    return x
