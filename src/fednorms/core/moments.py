"""Means and variances over the axes that normalization layers use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

_HALF = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """`x`, in float32 if it has 16 bits: statistics of halves overflow and lose small differences.

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


def raw_moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel of a layer's input (N, C, ...), and the number of values per channel.

    HBN's statistics pass collects these; they merge exactly over batches and clients by the law of total variance.

    >>> raw_moments(torch.tensor([[1.0], [3.0]]))
    (tensor([2.]), tensor([1.]), 2)
    """
    mean, var = batch_moments(x)
    return mean, var, x.numel() // x.shape[1]


def instance_moments(x: Tensor, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance of shape (N, C) over positions only; one position has variance 0.

    >>> instance_moments(torch.tensor([[[1.0, 3.0]]]), unbiased=True)
    (tensor([[2.]]), tensor([[2.]]))
    """
    flat = widened(x).reshape(x.shape[0], x.shape[1], -1)
    correction = int(unbiased and flat.shape[2] > 1)
    watched = torch.jit.is_tracing() or torch.compiler.is_compiling()  # an exported model holds torch's own operations
    if flat.requires_grad and torch.is_grad_enabled() and not watched:
        mean, var = _Moments.apply(flat, correction)
        return mean, var
    var, mean = torch.var_mean(flat, dim=2, correction=correction)
    return mean, var


class _Moments(torch.autograd.Function):
    """Mean and variance over the last axis. Their gradient reads the features twice, torch's own five times."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(flat: Tensor, correction: int) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(flat, dim=2, correction=correction)
        return mean, var

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        flat, correction = inputs
        ctx.save_for_backward(flat, output[0])
        ctx.divisor = flat.shape[2] - correction

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        flat, mean = ctx.saved_tensors
        of_mean, of_var = gradients
        level, slope = of_mean / flat.shape[2], of_var * (2 / ctx.divisor)
        return torch.addcmul(level.unsqueeze(2), flat - mean.unsqueeze(2), slope.unsqueeze(2)), None


def coarser(mean: Tensor, var: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Moments over one more axis, from equally many values each: mean of means, E[v] + E[(m - E[m])^2].

    >>> coarser(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), axis=1)
    (tensor([[2.]]), tensor([[1.]]))
    """
    whole = mean.mean(axis, keepdim=True)
    return whole, var.mean(axis, keepdim=True) + (mean - whole).square().mean(axis, keepdim=True)


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per sample and group of channels, from those per channel, repeated to shape (N, C).

    >>> mean, var = group_moments(torch.tensor([[1.0, 3.0, 5.0, 5.0]]), torch.zeros(1, 4), groups=2)
    >>> mean, var
    (tensor([[2., 2., 5., 5.]]), tensor([[1., 1., 0., 0.]]))
    """
    apart = [t.unflatten(1, (groups, -1)) for t in (mean, var)]
    m, v = (t.expand_as(apart[0]).flatten(1) for t in coarser(apart[0], apart[1], axis=2))
    return m, v


def rescaled(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """(x - centre) scale + shift for `x` (N, C, ...) and values of shape (C) or (N, C): two passes over `x`.

    >>> rescaled(torch.tensor([[1.0, 4.0]]), torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 3.0]]), torch.ones(2))
    tensor([[1., 7.]])
    """

    def wide(v: Tensor) -> Tensor:
        return v.reshape(*v.shape, *[1] * (x.dim() - 2))

    centred = x - wide(centre)
    return centred * wide(scale) if shift is None else torch.addcmul(wide(shift), centred, wide(scale))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The affine map y = gamma * x + beta per channel; None leaves out a factor or an offset.

    >>> affine(torch.ones(1, 2), torch.tensor([2.0, 3.0]), None)
    tensor([[2., 3.]])
    """
    if weight is not None and bias is not None:
        return torch.addcmul(per_channel(bias, x), x, per_channel(weight, x))
    if weight is not None:
        x = x * per_channel(weight, x)
    if bias is not None:
        x = x + per_channel(bias, x)
    return x
