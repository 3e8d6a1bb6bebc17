"""The patches of images that a convolution multiplies, and sums of patches back into images, as Triton kernels.

torch copies patches image by image (`im2col`), which for small batches of many clients is slower than the products.
"""

# ruff: noqa: ANN001, ANN202  (Triton reads the types of arguments at each call)
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # on machines without a GPU, and on some systems with one
    triton = None

if TYPE_CHECKING:
    from fednorms.engines.graphs.stacked_conv import Geometry

BLOCK = 512  # positions per program


def usable(t: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return triton is not None and t.is_cuda


def patches(x: Tensor, g: Geometry) -> Tensor:
    """The patch under each output value: (K, N, C, H, W) to (K, C h w, N H' W')."""
    (k, n, c), positions = x.shape[:3], x.shape[1] * g.output[0] * g.output[1]
    found = x.new_empty(k, c * g.kernel[0] * g.kernel[1], positions)
    grid = (triton.cdiv(positions, BLOCK), c, k)
    _patches[grid](x, found, n, c, *g.image, *g.output, *g.kernel, *g.stride, *g.padding, *g.dilation, BLOCK)
    return found


def images(p: Tensor, n: int, g: Geometry) -> Tensor:
    """The sum of the patches' values at each position of an image: the transposed map."""
    k, c = len(p), p.shape[1] // (g.kernel[0] * g.kernel[1])
    found = p.new_empty(k, n, c, *g.image)
    grid = (triton.cdiv(n * g.image[0] * g.image[1], BLOCK), c, k)
    _images[grid](p, found, n, c, *g.image, *g.output, *g.kernel, *g.stride, *g.padding, *g.dilation, BLOCK)
    return found


if triton is not None:

    @triton.jit
    def _patches(
        x, found, n, c, h, w, oh, ow,
        kh: tl.constexpr, kw: tl.constexpr, sh: tl.constexpr, sw: tl.constexpr, ph: tl.constexpr, pw: tl.constexpr,
        dh: tl.constexpr, dw: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        client, channel = tl.program_id(2).to(tl.int64), tl.program_id(1)
        m, space = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), oh * ow
        image, at = m // space, m % space
        top, left, there = (at // ow) * sh - ph, (at % ow) * sw - pw, m < n * space
        source = x + ((client * n + image) * c + channel) * h * w
        target = found + (client * c + channel) * kh * kw * n * space + m
        for tap in range(kh * kw):
            i, j = top + (tap // kw) * dh, left + (tap % kw) * dw
            value = tl.load(source + i * w + j, mask=there & (i >= 0) & (i < h) & (j >= 0) & (j < w), other=0.0)
            tl.store(target + tap * n * space, value, mask=there)

    @triton.jit
    def _images(
        p, found, n, c, h, w, oh, ow,
        kh: tl.constexpr, kw: tl.constexpr, sh: tl.constexpr, sw: tl.constexpr, ph: tl.constexpr, pw: tl.constexpr,
        dh: tl.constexpr, dw: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        client, channel = tl.program_id(2).to(tl.int64), tl.program_id(1)
        m, space = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), h * w
        image, at = m // space, m % space
        bottom, right, there = at // w + ph, at % w + pw, m < n * space
        source = p + (client * c + channel) * kh * kw * n * oh * ow + image * oh * ow
        total = tl.zeros((BLOCK,), dtype=found.dtype.element_ty)
        for tap in range(kh * kw):
            i, j = bottom - (tap // kw) * dh, right - (tap % kw) * dw
            inside = there & (i >= 0) & (j >= 0) & (i % sh == 0) & (j % sw == 0) & (i // sh < oh) & (j // sw < ow)
            total += tl.load(source + tap * n * oh * ow + (i // sh) * ow + j // sw, mask=inside, other=0.0)
        tl.store(found + ((client * n + image) * c + channel) * space + at, total, mask=there)
