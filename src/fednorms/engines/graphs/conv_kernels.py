"""Convolutions with a client axis as Triton kernels: products over patches that are read where they lie.

Sums have a fixed order, so repeats are equal bit for bit. A product of float32 numbers runs on the tensor cores as
three products of TF32 numbers (`tf32x3`), which keeps float32's accuracy; with TF32 allowed, as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if TYPE_CHECKING:
    from fednorms.engines.graphs.stacked_conv import Geometry

INTERPRETED = False  # tests run the kernels on the CPU
SPLIT = 264  # programs that fill a large card: sums over many positions are split until there are as many


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors."""
    there = triton is not None and all(t.dtype == torch.float32 for t in tensors)
    return there and (INTERPRETED or all(t.is_cuda for t in tensors))


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def _tile(n: int, most: int = 64) -> int:
    return max(16, min(most, triton.next_power_of_2(n)))


def output(x: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """Outputs (K, N, O, H', W')."""
    (k, n, c), o, (h, wd), (oh, ow) = x.shape[:3], w.shape[1], g.image, g.output
    y = x.new_empty(k, n, o, oh, ow)
    rows, columns = _tile(o), _tile(n * oh * ow)
    grid = (triton.cdiv(n * oh * ow, columns), triton.cdiv(o, rows), k)
    _output[grid](
        x, w, y, n, c, o, h, wd, oh, ow, *g.kernel, *g.stride, *g.padding, *g.dilation, rows, columns, 32, _precision(),
        num_warps=4,
    )  # fmt: skip
    return y


def images(y: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """Gradients of the images (K, N, C, H, W)."""
    (k, n, o), c, (h, wd), (oh, ow) = y.shape[:3], w.shape[2], g.image, g.output
    x = y.new_empty(k, n, c, h, wd)
    rows, columns = _tile(c), _tile(n * h * wd)
    grid = (triton.cdiv(n * h * wd, columns), triton.cdiv(c, rows), k)
    _images[grid](
        y, w, x, n, c, o, h, wd, oh, ow, *g.kernel, *g.stride, *g.padding, *g.dilation, rows, columns, 32, _precision(),
        num_warps=4,
    )  # fmt: skip
    return x


def weights(x: Tensor, y: Tensor, g: Geometry) -> Tensor:
    """Gradients of the weights (K, O, C, h, w)."""
    (k, n, c), o, (h, wd), (oh, ow) = x.shape[:3], y.shape[2], g.image, g.output
    taps = c * g.kernel[0] * g.kernel[1]
    rows, columns = _tile(o), _tile(taps)
    tiles = triton.cdiv(o, rows) * triton.cdiv(taps, columns)
    steps = triton.cdiv(n * oh * ow, 32)
    splits = max(1, min(SPLIT // tiles, steps // 4))  # not by the number of clients: bits must not depend on it
    share = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, share)
    found = x.new_empty(splits, k, o, taps)
    grid = (tiles, splits, k)
    _weights[grid](
        x, y, found, n, c, o, h, wd, oh, ow, share, *g.kernel, *g.stride, *g.padding, *g.dilation, rows, columns, 32,
        _precision(), num_warps=4,
    )  # fmt: skip
    return (found[0] if splits == 1 else found.sum(0)).view(k, o, c, *g.kernel)


if triton is not None:
    # The tiles of a product: A (rows: channels) times B (columns: positions of all images, in the order of memory).

    @triton.jit
    def _output(
        x, w, y, n, c, o, h, wd, oh, ow,
        kh: tl.constexpr, kw: tl.constexpr, sh: tl.constexpr, sw: tl.constexpr, ph: tl.constexpr, pw: tl.constexpr,
        dh: tl.constexpr, dw: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        client = tl.program_id(2).to(tl.int64)
        m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        space, taps = oh * ow, c * kh * kw
        image, at = m // space, m % space
        top, left = (at // ow) * sh - ph, (at % ow) * sw - pw
        there = m < n * space
        xs = x + client * n * c * h * wd + image * c * h * wd + top * wd + left
        ws = w + client * o * taps + r * taps
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, taps, DEEP):
            k = start + tl.arange(0, DEEP)
            channel, tap = k // (kh * kw), k % (kh * kw)
            down, across = (tap // kw) * dh, (tap % kw) * dw
            i, j = top[None, :] + down[:, None], left[None, :] + across[:, None]
            inside = (i >= 0) & (i < h) & (j >= 0) & (j < wd) & there[None, :] & (k < taps)[:, None]
            b = tl.load(xs[None, :] + (channel * h * wd + down * wd + across)[:, None], mask=inside, other=0.0)
            a = tl.load(ws[:, None] + k[None, :], mask=(r < o)[:, None] & (k < taps)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        ys = y + client * n * o * space + r[:, None] * space + (image * o * space + at)[None, :]
        tl.store(ys, total, mask=(r < o)[:, None] & there[None, :])

    @triton.jit
    def _images(
        y, w, x, n, c, o, h, wd, oh, ow,
        kh: tl.constexpr, kw: tl.constexpr, sh: tl.constexpr, sw: tl.constexpr, ph: tl.constexpr, pw: tl.constexpr,
        dh: tl.constexpr, dw: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        client = tl.program_id(2).to(tl.int64)
        m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        space, taps = h * wd, o * kh * kw
        image, at = m // space, m % space
        bottom, right = at // wd + ph, at % wd + pw
        there = m < n * space
        ys = y + client * n * o * oh * ow + image * o * oh * ow
        ws = w + client * o * c * kh * kw + r * kh * kw
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, taps, DEEP):
            k = start + tl.arange(0, DEEP)
            channel, tap = k // (kh * kw), k % (kh * kw)
            i = bottom[None, :] - ((tap // kw) * dh)[:, None]
            j = right[None, :] - ((tap % kw) * dw)[:, None]
            inside = (i >= 0) & (j >= 0) & there[None, :] & (k < taps)[:, None]
            if sh > 1:
                inside &= i % sh == 0
                i = i // sh
            if sw > 1:
                inside &= j % sw == 0
                j = j // sw
            inside &= (i < oh) & (j < ow)
            b = tl.load(ys[None, :] + (channel * oh * ow)[:, None] + i * ow + j, mask=inside, other=0.0)
            from_w = ws[:, None] + (channel * c * kh * kw + tap)[None, :]
            a = tl.load(from_w, mask=(r < c)[:, None] & (k < taps)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        xs = x + client * n * c * space + r[:, None] * space + (image * c * space + at)[None, :]
        tl.store(xs, total, mask=(r < c)[:, None] & there[None, :])

    @triton.jit
    def _weights(
        x, y, found, n, c, o, h, wd, oh, ow, share,
        kh: tl.constexpr, kw: tl.constexpr, sh: tl.constexpr, sw: tl.constexpr, ph: tl.constexpr, pw: tl.constexpr,
        dh: tl.constexpr, dw: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        client, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
        space, taps = oh * ow, c * kh * kw
        across_tiles = tl.cdiv(taps, COLUMNS)
        r = (tl.program_id(0) // across_tiles) * ROWS + tl.arange(0, ROWS)
        k = (tl.program_id(0) % across_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        channel, tap = k // (kh * kw), k % (kh * kw)
        down, across = (tap // kw) * dh, (tap % kw) * dw
        xs = x + client * n * c * h * wd + channel * h * wd + down * wd + across
        ys = y + client * n * o * space + r * space
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(split * share, (split + 1) * share):
            m = step * DEEP + tl.arange(0, DEEP)
            image, at = m // space, m % space
            top, left = (at // ow) * sh - ph, (at % ow) * sw - pw
            there = m < n * space
            i, j = top[None, :] + down[:, None], left[None, :] + across[:, None]
            inside = (i >= 0) & (i < h) & (j >= 0) & (j < wd) & there[None, :] & (k < taps)[:, None]
            b = tl.load(xs[:, None] + (image * c * h * wd + top * wd + left)[None, :], mask=inside, other=0.0)
            a = tl.load(ys[:, None] + (image * o * space + at)[None, :], mask=(r < o)[:, None] & there[None, :], other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        base = found + (split * tl.num_programs(2) + client) * o * taps
        tl.store(base + r[:, None] * taps + k[None, :], total, mask=(r < o)[:, None] & (k < taps)[None, :])
