"""Adaptive gradient clipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednorms.layers import adaptive_clip, unitwise_norm
from tests.reference import layers_reference as reference

SHAPES = [(4, 3, 2, 2), (5, 3), (4, 2, 3), (6,), (4, 1, 1, 1), (1, 5), (3, 1), ()]


def pair(shape, seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    grad, weight = (torch.randn(shape, generator=rng, dtype=dtype) for _ in range(2))
    if len(shape) > 1:
        grad = grad * torch.logspace(-2, 1, shape[0], dtype=dtype).reshape(-1, *[1] * (len(shape) - 1))
    return grad, weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clip", [0.05, 0.64, 100.0])
def test_clipping_is_the_slow_reference(shape, clip):
    grad, weight = pair(shape)
    expected = reference.adaptive_clip(grad.numpy(), weight.numpy(), clip)
    np.testing.assert_allclose(adaptive_clip(grad, weight, clip).numpy(), expected, rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), clip=st.floats(0.01, 10), zero=st.booleans())
def test_every_unit_is_bounded_and_units_below_the_bound_are_untouched(seed, clip, zero):
    grad, weight = pair((6, 3, 2, 2), seed, torch.float32)
    if zero:
        weight[0] = 0
    got = adaptive_clip(grad, weight, clip)
    for i in range(6):
        bound = clip * max(weight[i].norm().item(), 1e-3)
        assert got[i].norm().item() <= bound * (1 + 1e-6)
        if grad[i].norm().item() < bound * (1 - 1e-6):
            assert torch.equal(got[i], grad[i])


def test_units_are_rows_of_a_linear_weight_and_filters_of_a_convolution():
    assert unitwise_norm(torch.ones(5, 4)).flatten().tolist() == [2.0] * 5
    assert unitwise_norm(torch.ones(3, 2, 1, 2)).flatten().tolist() == [2.0] * 3
    assert unitwise_norm(torch.ones(4)).numel() == 1
    assert unitwise_norm(torch.ones(4, 1, 1, 1)).numel() == 1


def test_infinite_clip_is_no_clip_bit_for_bit():
    grad, weight = pair((4, 3, 2, 2), dtype=torch.float32)
    grad[1] = 0
    weight[2] = 0
    assert torch.equal(adaptive_clip(grad, weight, float("inf")), grad)


def test_zero_gradients_stay_zero_and_nan_stays_visible():
    weight = torch.ones(2, 3)
    assert torch.equal(adaptive_clip(torch.zeros(2, 3), weight, 0.1), torch.zeros(2, 3))
    grad = torch.tensor([[float("nan"), 0.0, 0.0], [9.0, 9.0, 9.0]])
    got = adaptive_clip(grad, weight, 0.1)
    assert got[0].isnan().any()
    assert got[1].isfinite().all()


def test_half_precision_norms_do_not_overflow():
    grad = torch.full((2, 100), 500.0, dtype=torch.float16)
    got = adaptive_clip(grad, torch.ones(2, 100, dtype=torch.float16), 1.0)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float().norm(dim=1), torch.full((2,), 10.0), rtol=1e-2, atol=0)
