"""FedNN's adaptive group normalization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.layers import AdaptiveGroupNorm
from tests.reference import layers_reference as reference

BN, GN = (60.0, -60.0), (-60.0, 60.0)


def images(dtype=torch.float64, shape=(4, 6, 3, 5)):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(5)) * 2 + 1


def layer_at(logits, **options) -> AdaptiveGroupNorm:
    layer = AdaptiveGroupNorm(6, dtype=torch.float64, tau=0.5, **options)
    with torch.no_grad():
        layer.logits.copy_(torch.tensor(logits))
        layer.weight.uniform_(0.5, 2)
        layer.bias.uniform_(-1, 1)
    return layer


@pytest.mark.parametrize("shape", [(4, 6, 3, 5), (4, 6, 7), (4, 6)])
def test_one_hot_batch_is_batchnorm_and_one_hot_group_is_groupnorm(shape):
    x = images(shape=shape)
    bn, gn = layer_at(BN), layer_at(GN)
    torch.testing.assert_close(bn(x), F.batch_norm(x, None, None, bn.weight, bn.bias, True, eps=1e-5))
    torch.testing.assert_close(gn(x), F.group_norm(x, 2, gn.weight, gn.bias))
    torch.testing.assert_close(gn.eval()(x), F.group_norm(x, 2, gn.weight, gn.bias))
    bn.eval()
    expected = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, eps=1e-5)
    torch.testing.assert_close(bn(x), expected)


def test_float32_reductions_are_within_the_specified_tolerance():
    x = images(torch.float32)
    layer = AdaptiveGroupNorm(6, tau=0.5)
    with torch.no_grad():
        layer.logits.copy_(torch.tensor(BN))
    torch.testing.assert_close(layer(x), F.batch_norm(x, None, None, training=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["paper", "author"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_training_forward_is_the_slow_reference(variant, groups):
    layer, x = layer_at((0.3, -0.2), groups=groups, variant=variant), images()
    start = layer.running_var.clone()
    with noise.keyed(torch.tensor([3, 4])):
        share = layer.share().tolist()
    with noise.keyed(torch.tensor([3, 4])):
        y = layer(x)
    expected, mean, var = reference.adaptive_group_norm(
        x.numpy(), share, groups, variant, 1e-5, layer.weight.detach().numpy(), layer.bias.detach().numpy()
    )
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(layer.running_mean.numpy(), 0.003 * mean)
    np.testing.assert_allclose(layer.running_var.numpy(), 0.997 * start.numpy() + 0.003 * var)


def test_running_variance_starts_at_one_in_the_paper_and_at_zero_in_the_code():
    assert torch.equal(AdaptiveGroupNorm(4).running_var, torch.ones(4))
    assert torch.equal(AdaptiveGroupNorm(4, variant="author").running_var, torch.zeros(4))


def test_shares_sum_to_one_and_the_draw_is_gumbel_softmax():
    layer = layer_at((0.4, 0.1))
    key = torch.tensor([9, 2])
    with noise.keyed(key):
        share = layer.share()
    with noise.keyed(key):
        u = noise.uniform((2,), layer.stream, torch.zeros(1, dtype=torch.float32)).double()
    z = (layer.logits - torch.log(-torch.log(u))) / layer.tau
    torch.testing.assert_close(share, z.exp() / z.exp().sum(), rtol=1e-6, atol=1e-6)
    assert abs(share.sum().item() - 1) < 1e-12


def test_the_draw_changes_with_key_and_stream_and_only_while_training():
    layer = AdaptiveGroupNorm(4, stream=1)
    other = AdaptiveGroupNorm(4, stream=2)
    with noise.keyed(torch.tensor([1, 1])):
        a, c = layer.share(), other.share()
    with noise.keyed(torch.tensor([1, 2])):
        b = layer.share()
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(layer.eval().share(), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_evaluation_is_deterministic_and_touches_no_buffer(mode):
    layer, x = layer_at((0.2, 0.4), eval_mode=mode).eval(), images()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert torch.equal(layer(x), layer(x))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    expected = torch.softmax(layer.logits / layer.tau, 0) if mode == "soft" else torch.tensor([0.0, 1.0]).double()
    torch.testing.assert_close(layer.share(), expected)


def test_sample_mode_still_draws_in_evaluation():
    layer = AdaptiveGroupNorm(4, eval_mode="sample").eval()
    with noise.keyed(torch.tensor([1, 1])):
        a = layer.share()
    with noise.keyed(torch.tensor([1, 7])):
        assert not torch.equal(a, layer.share())


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_logit_gradients_are_nonzero_and_sum_to_zero(variant):
    layer = layer_at((0.3, -0.2), variant=variant)
    layer(images()).pow(3).sum().backward()
    assert layer.logits.grad.abs().min() > 0
    assert abs(layer.logits.grad.sum().item()) < 1e-9 * layer.logits.grad.abs().max().item()


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_gradient_check(variant):
    layer = layer_at((0.3, -0.2), variant=variant)
    x = images(shape=(3, 6, 2, 2)).requires_grad_()

    def forward(x, weight, bias, logits):
        values = {"weight": weight, "bias": bias, "logits": logits}
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        with noise.keyed(torch.tensor([1, 2])):
            return torch.func.functional_call(layer, {**values, **buffers}, (x,))

    inputs = (x, *(p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias, layer.logits)))
    assert torch.autograd.gradcheck(forward, inputs)


def test_noncontiguous_and_channels_last_inputs():
    layer, x = layer_at((0.3, -0.2)).eval(), images()
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), layer(x))
    torch.testing.assert_close(layer(x.transpose(2, 3)).transpose(2, 3), layer(x))


def test_one_image_of_one_pixel_stays_finite_in_both_variants():
    for variant in ("paper", "author"):
        layer = AdaptiveGroupNorm(4, variant=variant)
        assert torch.isfinite(layer(torch.randn(1, 4))).all()
        assert torch.isfinite(layer.running_var).all()


def test_half_precision_statistics_do_not_overflow():
    x = torch.full((2, 4, 8, 8), 300.0, dtype=torch.bfloat16)
    y = AdaptiveGroupNorm(4)(x)
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()


def test_like_keeps_affine_and_flags():
    bn = nn.BatchNorm2d(6).double().eval()
    nn.init.uniform_(bn.weight)
    new = AdaptiveGroupNorm.like(bn, groups=3, name="layer1.bn")
    assert new.weight is bn.weight
    assert new.bias is bn.bias
    assert not new.training
    assert new.running_var.dtype == torch.float64
    assert new.stream == noise.stream("layer1.bn")
    plain = AdaptiveGroupNorm.like(nn.BatchNorm2d(6, affine=False))
    assert plain.weight is None
    assert plain(torch.randn(2, 6, 2, 2)).shape == (2, 6, 2, 2)


def test_bad_options_are_named():
    with pytest.raises(BadInput, match=r'"stem".*7 channels do not divide into 2 groups'):
        AdaptiveGroupNorm.like(nn.BatchNorm2d(7), name="stem")
    with pytest.raises(BadInput, match='eval_mode must be one of soft, hard, sample, got "mean"'):
        AdaptiveGroupNorm(4, eval_mode="mean")
    with pytest.raises(BadInput, match="variant"):
        AdaptiveGroupNorm(4, variant="code")


def keyed(step, call):
    with noise.keyed(torch.tensor([3, step])):
        return call()


def draws(layer, steps):
    """The shares that a layer without freezing would draw, in plain NumPy."""
    a, tau, stored = layer.logits.detach().numpy(), float(layer.tau), []
    for step in steps:
        u = keyed(step, lambda: noise.uniform((2,), layer.stream, torch.empty(0))).double().numpy()
        e = np.exp((z := (a - np.log(-np.log(u))) / tau) - z.max())
        stored.append(e / e.sum())
    return stored


def test_a_layer_freezes_at_its_first_saturated_share():
    plain, layer = (layer_at((0.2, 0.0), freeze_on_saturation=f) for f in (False, True))
    for each in (plain, layer):
        each.tau.fill_(0.05)
    steps = range(5, 17)
    wanted = draws(plain, steps)
    first = [np.float32(s).max() - np.float32(s).min() >= 1 for s in wanted].index(True)
    assert 0 < first < 8  # not a vacuous test
    for i, step in enumerate(steps):
        got = keyed(step, layer.share)
        if i < first:
            assert torch.equal(got, keyed(step, plain.share))
            assert not layer.choice.any()
        else:
            assert got.tolist() == layer.choice.tolist() == np.round(wanted[first]).tolist()
    layer.train()
    keyed(50, lambda: layer(images())).square().sum().backward()
    assert layer.logits.grad is None or not layer.logits.grad.any()
    assert layer.weight.grad.abs().sum() > 0
    for mode in ("soft", "hard", "sample"):
        layer.eval().eval_mode = mode
        assert keyed(60, layer.share).tolist() == layer.choice.tolist()


def test_a_test_never_freezes_a_layer():
    layer = layer_at(BN, eval_mode="sample", freeze_on_saturation=True).eval()
    keyed(0, lambda: layer(images()))
    assert not layer.choice.any()


def test_statistics_of_a_trained_layer_are_kept_and_those_of_a_new_one_are_not():
    bn = nn.BatchNorm2d(6)
    assert not AdaptiveGroupNorm.like(bn, variant="author").running_var.any()
    bn(images(torch.float32))
    for variant in ("paper", "author"):
        new = AdaptiveGroupNorm.like(bn, variant=variant)
        assert torch.equal(new.running_mean, bn.running_mean)
        assert torch.equal(new.running_var, bn.running_var)
