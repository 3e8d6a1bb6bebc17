"""Convolutions of several clients at once, each with its own weights: images (K, N, C, H, W), weights (K, O, C, h, w).

The three maps (output, gradient of the images, gradient of the weights) are the three ways to fill one slot of the
same trilinear form, so each one's derivatives are the other two. All are batched products over copied patches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from fednorms.engines.graphs import conv_kernels as kernels
from fednorms.engines.graphs.fused import tracing


class Geometry(NamedTuple):
    """What a convolution's arguments say besides its weights, and the sizes that follow."""

    image: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the output."""
        h, w = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(self.image, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        return h, w


def convolve(x: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """The output (K, N, O, H', W')."""
    return _Output.apply(x, w, g)  # type: ignore[no-any-return]


class _Output(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, w: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.g = g
        found = w.flatten(2) @ _patches(x, g)
        return found.unflatten(2, (x.shape[1], *g.output)).transpose(1, 2).contiguous()

    @staticmethod
    @override
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, w), (y,) = ctx.saved_tensors, slopes
        return (
            _Images.apply(y, w, ctx.g) if ctx.needs_input_grad[0] else None,
            _Weights.apply(x, y, ctx.g) if ctx.needs_input_grad[1] else None,
            None,
        )


class _Images(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, y: Tensor, w: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(y, w)
        ctx.g = g
        return _sum_of_patches(w.flatten(2).mT @ _rows(y), y.shape[1], g)

    @staticmethod
    @override
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (y, w), (x,) = ctx.saved_tensors, slopes
        return (
            _Output.apply(x.contiguous(), w, ctx.g) if ctx.needs_input_grad[0] else None,
            _Weights.apply(x.contiguous(), y, ctx.g) if ctx.needs_input_grad[1] else None,
            None,
        )


class _Weights(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, y: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.g = g
        return (_rows(y) @ _patches(x, g).mT).unflatten(2, (x.shape[2], *g.kernel))

    @staticmethod
    @override
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, y), (w,) = ctx.saved_tensors, slopes
        return (
            _Images.apply(y, w.contiguous(), ctx.g) if ctx.needs_input_grad[0] else None,
            _Output.apply(x, w.contiguous(), ctx.g) if ctx.needs_input_grad[1] else None,
            None,
        )


def _rows(y: Tensor) -> Tensor:
    """Values (K, N, O, H', W') as (K, O, N H' W')."""
    return y.flatten(3).transpose(1, 2).flatten(2)


def _patches(x: Tensor, g: Geometry) -> Tensor:
    """The patch under each output value, (K, C h w, N H' W')."""
    if tracing():
        return _windows(x, g)
    if kernels.usable(x):
        return kernels.patches(x, g)
    k, n = x.shape[:2]
    found = F.unfold(x.flatten(0, 1), g.kernel, g.dilation, g.padding, g.stride)
    return found.unflatten(0, (k, n)).transpose(1, 2).flatten(2)


def _sum_of_patches(p: Tensor, n: int, g: Geometry) -> Tensor:
    """Images (K, N, C, H, W) from values of patches (K, C h w, N H' W')."""
    if tracing():
        return _sum_of_windows(p, n, g)
    if kernels.usable(p):
        return kernels.images(p, n, g)
    apart = p.unflatten(2, (n, -1)).transpose(1, 2).flatten(0, 1)
    found = F.fold(apart, g.image, g.kernel, g.dilation, g.padding, g.stride)
    return found.unflatten(0, (len(p), n))


# -- the same maps as operations that a compiler fuses with those before and after ------------------------------------
def _windows(x: Tensor, g: Geometry) -> Tensor:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = g.kernel, g.stride, g.padding, g.dilation
    padded = F.pad(x, (pw, pw, ph, ph))
    found = padded.unfold(3, dh * (kh - 1) + 1, sh).unfold(4, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
    return found.permute(0, 2, 5, 6, 1, 3, 4).reshape(len(x), -1, x.shape[1] * math.prod(g.output))


def _sum_of_windows(p: Tensor, n: int, g: Geometry) -> Tensor:
    (h, w), (sh, sw), (ph, pw), (dh, dw) = g.image, g.stride, g.padding, g.dilation
    taps = p.unflatten(2, (n, *g.output)).unflatten(1, (-1, *g.kernel))
    total = p.new_zeros(())
    for i in range(g.kernel[0]):
        for j in range(g.kernel[1]):
            spread = _spread(_spread(taps[:, :, i, j].transpose(1, 2), 3, sh), 4, sw)
            top, left = i * dh - ph, j * dw - pw
            total = total + F.pad(spread, (left, w - left - spread.shape[4], top, h - top - spread.shape[3]))
    return total


def _spread(t: Tensor, axis: int, step: int) -> Tensor:
    """Values with `step - 1` zeros between neighbors along an axis."""
    if step == 1:
        return t
    apart = torch.stack([t, *[torch.zeros_like(t)] * (step - 1)], axis + 1).flatten(axis, axis + 1)
    return apart.narrow(axis, 0, (t.shape[axis] - 1) * step + 1)
