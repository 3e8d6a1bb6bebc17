"""Convolutions of stacked clients against torch's own, one client at a time, with both ways to copy patches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from fednorms.engines.graphs import stacked_conv
from fednorms.engines.graphs.stacked_conv import Geometry, convolve

SHAPES = [  # clients, images, channels, outputs, height, width, kernel, stride, padding, dilation
    (2, 3, 3, 5, 8, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 2, 4, 6, 9, 7, (5, 3), (2, 1), (2, 0), (1, 1)),
    (1, 2, 5, 3, 9, 9, (3, 3), (2, 2), (1, 1), (2, 2)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_all_derivatives_are_those_of_single_clients(shape):
    k, n, c, o, h, w, kernel, stride, padding, dilation = shape
    g = Geometry((h, w), kernel, stride, padding, dilation)
    x = torch.randn(k, n, c, h, w, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(k, o, c, *kernel, dtype=torch.float64, requires_grad=True)

    def one_by_one(x, weight):
        pairs = zip(x, weight, strict=True)
        return torch.stack([F.conv2d(a, b, None, stride, padding, dilation) for a, b in pairs])

    found = []
    for way in (lambda x, w: convolve(x, w, g), one_by_one):
        y = way(x, weight)
        first = torch.autograd.grad(y.sin().sum(), [x, weight], create_graph=True)
        second = torch.autograd.grad(sum((t * t).sum() for t in first), [x, weight])
        found.append([y, *first, *second])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_the_kernels_copy_what_torch_copies():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # read when Triton is imported
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def compare_kernels():
    from fednorms.engines.graphs import conv_kernels

    for k, n, c, _, h, w, *how in SHAPES:
        g = Geometry((h, w), *how)
        x = torch.randn(k, n, c, h, w, dtype=torch.float64)
        copied = stacked_conv._patches(x, g)
        assert torch.equal(conv_kernels.patches(x, g), copied)
        torch.testing.assert_close(conv_kernels.images(copied, n, g), stacked_conv._sum_of_patches(copied, n, g))


if __name__ == "__main__":
    compare_kernels()
