"""Layers that mix batch statistics with the server's: HybridNorm (HBN) and MixedNorm (GReg, appendix E.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.layers import HybridNorm, MixedNorm, raw_moments
from tests.reference import layers_reference as reference

KINDS = ["global", "fixed", "learned", "ensemble"]


def images(dtype=torch.float64, shape=(4, 3, 2, 5)):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(5)) * 2 + 1


def shuffled(layer: nn.Module) -> nn.Module:
    """Random values in every float parameter and buffer but the switch."""
    rng = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            if value.is_floating_point() and name not in ("active", "mix"):
                value.copy_(torch.rand(value.shape, generator=rng) + 0.5)
    return layer


# HybridNorm


def test_hybrid_norm_is_the_slow_reference():
    layer, x = shuffled(HybridNorm(3).double()), images()
    args = [t.detach().numpy() for t in (layer.phi, layer.mean, layer.var, layer.weight, layer.bias)]
    np.testing.assert_allclose(layer(x).detach().numpy(), reference.hybrid_norm(x.numpy(), *args), rtol=1e-9)


@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (4, 3, 6), (4, 3)])
def test_hybrid_norm_limits_are_batchnorm_and_the_global_statistics(shape):
    layer, x = shuffled(HybridNorm(3).double()), images(shape=shape)
    batch = F.batch_norm(x, None, None, layer.weight, layer.bias, True, eps=layer.eps)
    fixed = F.batch_norm(x, layer.mean, layer.var, layer.weight, layer.bias, False, eps=layer.eps)
    nn.init.constant_(layer.phi, 40.0)
    torch.testing.assert_close(layer(x), batch)
    nn.init.constant_(layer.phi, -40.0)
    torch.testing.assert_close(layer(x), fixed)
    nn.init.constant_(layer.phi, 0.3)
    torch.testing.assert_close(layer.eval()(x), fixed)


def test_hybrid_norm_starts_half_and_half_and_changes_no_buffer():
    layer, x = HybridNorm(3).double(), images()
    assert torch.equal(layer.phi, torch.zeros(3, dtype=torch.float64))
    y = layer(x)
    mean, var, _ = raw_moments(x)
    expected = (x - (mean / 2)[:, None, None]) / torch.sqrt((var + 1) / 2 + 1e-5)[:, None, None]
    torch.testing.assert_close(y, expected)
    assert torch.equal(layer.mean, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(layer.var, torch.ones(3, dtype=torch.float64))


def test_hybrid_norm_gradients_flow_through_phi_and_batch_but_not_the_global_statistics():
    layer = shuffled(HybridNorm(3).double())

    def forward(x, weight, bias, phi):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias, "phi": phi}, (x,))

    inputs = (images(shape=(3, 3, 2)), *(p.detach().clone() for p in (layer.weight, layer.bias, layer.phi)))
    assert torch.autograd.gradcheck(forward, tuple(value.requires_grad_() for value in inputs))
    assert not layer.mean.requires_grad


def test_raw_moments_merge_to_the_moments_of_all_data():
    a, b = images(shape=(3, 3, 2, 2)), images(shape=(5, 3, 2, 2)) + 4
    (ma, va, na), (mb, vb, nb) = raw_moments(a), raw_moments(b)
    mean = (na * ma + nb * mb) / (na + nb)
    var = (na * (va + (ma - mean) ** 2) + nb * (vb + (mb - mean) ** 2)) / (na + nb - 1)
    values = torch.cat([a, b]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, values.mean(1))
    torch.testing.assert_close(var, values.var(1, correction=1))
    assert na == 12


def test_hybrid_norm_like_starts_from_the_running_statistics():
    bn = shuffled(nn.BatchNorm2d(3, eps=1e-3).double()).eval()
    new = HybridNorm.like(bn)
    x = images()
    torch.testing.assert_close(new(x), bn(x))
    assert new.weight is bn.weight
    assert new.mean is not bn.running_mean
    untracked = HybridNorm.like(nn.BatchNorm2d(3, track_running_stats=False, affine=False))
    assert torch.equal(untracked.var, torch.ones(3))
    assert untracked.weight is None


# MixedNorm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (4, 3)])
def test_inactive_mixed_norm_is_batchnorm_bit_for_bit(kind, shape):
    bn = shuffled(nn.BatchNorm2d(3) if len(shape) == 4 else nn.BatchNorm1d(3))
    ours = MixedNorm.like(bn, kind=kind, lam=0.7)
    ours.sent_mean.fill_(5.0)
    ours.weight, ours.bias = nn.Parameter(bn.weight.clone()), nn.Parameter(bn.bias.clone())
    x = images(torch.float32, shape)
    ours_x, bn_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):
        a, b = ours(ours_x), bn(bn_x)
        assert torch.equal(a, b)
        a.pow(3).sum().backward()
        b.pow(3).sum().backward()
    assert torch.equal(ours_x.grad, bn_x.grad)
    assert torch.equal(ours.weight.grad, bn.weight.grad)
    for name, value in bn.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], value), name
    assert torch.equal(ours.eval()(x), bn.eval()(x))


@pytest.mark.parametrize("kind", KINDS)
def test_active_mixed_norm_is_the_slow_reference_and_updates_like_batchnorm(kind):
    layer, x = shuffled(MixedNorm(3, kind=kind, lam=0.3).double()), images()
    layer.active.fill_(1.0)
    bn = nn.BatchNorm2d(3).double()
    bn.load_state_dict({name: layer.state_dict()[name] for name in bn.state_dict()})
    lam = 0.3
    if kind == "learned":
        nn.init.constant_(layer.mix, 0.8)
        lam = 1 / (1 + np.exp(-0.8))
    y = layer(x)
    bn(x)
    values = [t.detach().numpy() for t in (layer.sent_mean, layer.sent_var, layer.weight, layer.bias)]
    np.testing.assert_allclose(y.detach().numpy(), reference.mixed_norm(x.numpy(), kind, lam, *values), rtol=1e-9)
    for name, value in bn.named_buffers():
        assert torch.equal(dict(layer.named_buffers())[name], value), name
    torch.testing.assert_close(layer.eval()(x), bn.eval()(x))


def test_mixed_norm_limits():
    x = images()
    batch = F.batch_norm(x, None, None, training=True, eps=1e-5)

    def active(kind, lam=0.5):
        layer = MixedNorm(3, kind=kind, lam=lam).double()
        layer.sent_mean.copy_(torch.tensor([0.1, 0.2, 0.3]))
        layer.active.fill_(1.0)
        return layer

    torch.testing.assert_close(active("fixed", 0.0)(x), batch)
    torch.testing.assert_close(active("fixed", 1.0)(x), active("global")(x))
    torch.testing.assert_close(active("learned")(x), active("fixed", 0.5)(x))
    equal = active("ensemble")
    mean, var, _ = raw_moments(x)
    equal.sent_mean.copy_(mean)
    equal.sent_var.copy_(var)
    torch.testing.assert_close(equal(x), batch)


def test_only_the_learned_kind_has_a_mix_and_it_is_trained():
    assert "mix" not in MixedNorm(3, kind="fixed").state_dict()
    layer = MixedNorm(3, kind="learned").double()
    layer(images()).pow(3).sum().backward()
    assert layer.mix.grad == 0, "inactive: the mixture has no influence"
    layer.active.fill_(1.0)
    layer(images()).pow(3).sum().backward()
    assert layer.mix.grad != 0


def test_mixed_norm_counts_batches_as_an_integer():
    layer = MixedNorm(3)
    layer(images(torch.float32))
    assert layer.num_batches_tracked.dtype == torch.long
    assert layer.num_batches_tracked == 1


def test_mixed_norm_refuses_bad_options():
    with pytest.raises(BadInput, match="kind must be one of"):
        MixedNorm(3, kind="some")
    with pytest.raises(BadInput, match="lam must be between 0 and 1"):
        MixedNorm(3, lam=2)
    with pytest.raises(BadInput, match='"bn1" has momentum=None'):
        MixedNorm.like(nn.BatchNorm2d(3, momentum=None), name="bn1")


@pytest.mark.parametrize("layer", [HybridNorm(3), MixedNorm(3, kind="learned")])
def test_layers_write_only_into_the_tensors_functional_call_is_given(layer):
    mine = {name: value.clone() for name, value in layer.state_dict().items()}
    given = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    torch.func.functional_call(layer, given, (images(torch.float32),))
    assert all(torch.equal(value, mine[name]) for name, value in layer.state_dict().items())
    if isinstance(layer, MixedNorm):
        assert not torch.equal(given["running_mean"], mine["running_mean"])
