"""Keyed random numbers: open interval, uniform, and another sequence for every key, step and stream."""

from __future__ import annotations

import pytest
import torch

from fednorms.core.noise import _unit, hashed_uniform


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_interval_are_never_drawn(dtype):
    """In float32 the largest 24-bit number plus a half rounds up to 2^24, and the Gumbel number of 1 is infinite."""
    least, most = _unit(torch.tensor([0, -1]), dtype)  # no bit and every bit
    assert 0 < least < most < 1
    assert torch.isfinite(-torch.log(-torch.log(torch.stack([least, most])))).all()


def test_numbers_are_the_same_in_both_types():
    key = torch.tensor([123, 4])
    assert torch.equal(
        hashed_uniform(key, 5, (1000,), torch.float32).double(), hashed_uniform(key, 5, (1000,), torch.float64)
    )


def test_numbers_are_uniform():
    u = hashed_uniform(torch.tensor([99, 1]), 7, (200_000,), torch.float64)
    counts = torch.histc(u, bins=100, min=0, max=1)
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert 55 < chi_square < 150  # 99 degrees of freedom: 1e-4 at either end


@pytest.mark.parametrize("change", ["client", "step", "stream"])
def test_another_key_gives_unrelated_numbers(change):
    first = hashed_uniform(torch.tensor([8, 1]), 3, (100_000,), torch.float64) - 0.5
    key = torch.tensor([9 if change == "client" else 8, 2 if change == "step" else 1])
    other = hashed_uniform(key, 4 if change == "stream" else 3, (100_000,), torch.float64) - 0.5
    assert abs(float((first * other).mean())) * 12 < 5 / 100_000**0.5
    shifted = (first[1:] * other[:-1]).mean()
    assert abs(float(shifted)) * 12 < 5 / 100_000**0.5


def test_bits_of_neighboring_steps_and_streams_look_like_coin_flips():
    """Every bit of a number flips in half of the cases when only the step, the stream or the client moves by one."""
    base = torch.tensor([1000, 7])
    for key, number in ((torch.tensor([1001, 7]), 3), (torch.tensor([1000, 8]), 3), (base, 4)):
        a, b = ((hashed_uniform(k, n, (40_000,), torch.float64) * 2**23).long() for k, n in ((base, 3), (key, number)))
        for bit in range(23):
            flips = float((((a ^ b) >> bit) & 1).double().mean())
            assert abs(flips - 0.5) < 5 * 0.5 / 40_000**0.5
