"""Moments: derived ones compared with torch's, and the derivatives of those with their own gradient."""

from __future__ import annotations

import pytest
import torch

from fednorms.core.moments import coarser, group_moments, instance_moments, rescaled

X = torch.randn(3, 4, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3


@pytest.mark.parametrize("unbiased", [False, True])
def test_instance_moments_have_first_and_second_derivatives(unbiased):
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: instance_moments(x, unbiased), [X.clone().requires_grad_()])


@pytest.mark.parametrize("unbiased", [False, True])
def test_instance_moments_are_torchs_with_and_without_a_gradient(unbiased):
    var, mean = torch.var_mean(X, dim=(2, 3), correction=int(unbiased))
    for x in (X, X.clone().requires_grad_()):
        torch.testing.assert_close(instance_moments(x, unbiased), (mean, var))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore:Converting a tensor")
def test_instance_moments_under_function_transforms_and_in_traces():
    def total(x):
        mean, var = instance_moments(x)
        return (mean * var).sum()

    (want,) = torch.autograd.grad(total(x := X.clone().requires_grad_()), x)
    torch.testing.assert_close(torch.func.grad(total)(X), want)
    torch.testing.assert_close(torch.vmap(torch.func.grad(total))(torch.stack([X, X])), torch.stack([want, want]))
    traced = torch.jit.trace(total, x)
    assert "PythonOp" not in str(traced.graph)


def test_group_and_batch_moments_follow_from_instance_moments():
    var, mean = torch.var_mean(X.reshape(3, 2, -1), dim=2, correction=0)
    got = group_moments(*instance_moments(X), groups=2)
    torch.testing.assert_close(got, (mean.repeat_interleave(2, 1), var.repeat_interleave(2, 1)))
    var, mean = torch.var_mean(X, dim=(0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(coarser(*instance_moments(X), axis=0), (mean[..., 0, 0], var[..., 0, 0]))


def test_rescaling_takes_values_per_channel_or_per_image_and_channel():
    centre, scale, shift = torch.randn(4).double(), torch.randn(3, 4).double(), torch.randn(4).double()
    want = (X - centre[:, None, None]) * scale[..., None, None] + shift[:, None, None]
    torch.testing.assert_close(rescaled(X, centre, scale, shift), want)
    torch.testing.assert_close(rescaled(X, centre, scale, None), want - shift[:, None, None])
