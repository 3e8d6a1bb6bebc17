"""The normalization layers that papers compare with: FRN, RBN, SN, IN, PN, and FBN's constant statistics."""

import copy

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.layers import (
    FilterResponseNorm,
    GlobalNorm,
    PopulationNorm,
    RepresentativeNorm,
    SwitchableNorm,
    instance_norm_like,
    is_batchnorm,
    is_norm,
    keeps_statistics,
    merged_moments,
    no_norm_like,
    swap,
)
from tests.reference import comparison_norms as reference

MAKERS = {
    "frn": FilterResponseNorm.like,
    "rbn": RepresentativeNorm.like,
    "sn": SwitchableNorm.like,
    "pn": PopulationNorm.like,
    "fbn": GlobalNorm.like,
    "inorm": instance_norm_like,
}


def images(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*(shape or (3, 4, 5, 6)), generator=generator, dtype=torch.float64) + 0.7


def shuffled(layer, seed=1):
    """The layer in float64 with parameters that are neither 0 nor 1."""
    layer = layer.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.3)
    return layer


def numbers(*tensors):
    return [t.detach().numpy() for t in tensors]


def near(got, wanted, atol=1e-12):
    torch.testing.assert_close(got.detach(), torch.as_tensor(wanted), atol=atol, rtol=0)


# -- what all of them keep --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MAKERS)
def test_each_keeps_affine_type_flag_and_is_not_a_batch_norm(name):
    bn = shuffled(nn.BatchNorm2d(4)).eval()
    bn.weight.requires_grad_(False)
    new = MAKERS[name](bn, name="here")
    assert new.weight is bn.weight
    assert new.bias is bn.bias
    assert not new.training
    assert {t.dtype for t in new.state_dict().values()} <= {torch.float64, torch.int64}
    assert is_norm(new)
    assert not is_batchnorm(new)
    assert keeps_statistics(new) is (name in ("rbn", "sn", "fbn"))
    assert no_norm_like(new)(1) == 1


@pytest.mark.parametrize("name", MAKERS)
def test_each_takes_layers_without_affine(name):
    new = MAKERS[name](nn.BatchNorm2d(4, affine=False).double())
    assert "weight" not in new.state_dict()
    assert new(images()).shape == images().shape


@pytest.mark.parametrize("name", MAKERS)
def test_each_keeps_the_activation_of_a_fused_layer(name):
    norm_act = pytest.importorskip("timm.layers")
    for act in (nn.ReLU, nn.SiLU):
        fused = norm_act.BatchNormAct2d(4, act_layer=act).double()
        net = nn.Sequential(fused)
        swap(net, is_batchnorm, lambda old, key: MAKERS[name](old, name=key))
        plain = MAKERS[name](nn.BatchNorm2d(4).double(), name="0")
        near(net(images()), act()(plain(images())))  # FRN's threshold at 0 is the ReLU it replaced


@pytest.mark.parametrize("name", ["rbn", "sn", "pn", "fbn"])
def test_vectors_count_as_one_position(name):
    layer = shuffled(MAKERS[name](nn.BatchNorm1d(4).double()))
    other = copy.deepcopy(layer)
    x = images(6, 4)
    near(layer(x), other(x[:, :, None, None])[:, :, 0, 0])


@pytest.mark.parametrize("name", ["frn", "inorm"])
def test_vectors_are_refused_by_name(name):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(BadInput, match=r'Layer "1".*several positions.*BatchNorm1d'):
        swap(net, is_batchnorm, lambda old, key: MAKERS[name](old, name=key))
    with pytest.raises(BadInput, match=r"\(3, 4\)"):
        FilterResponseNorm(4)(torch.ones(3, 4))


def test_cumulative_statistics_are_refused():
    with pytest.raises(BadInput, match="momentum=None"):
        RepresentativeNorm.like(nn.BatchNorm2d(3, momentum=None))


# -- FRN --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tlu", [True, False])
def test_frn_by_the_formula(tlu):
    layer = shuffled(FilterResponseNorm(4, tlu=tlu))
    tau = layer.tau.detach().numpy() if tlu else None
    near(layer(images()), reference.frn(images().numpy(), *numbers(layer.weight, layer.bias), tau))


def test_frn_has_unit_mean_square_flips_with_its_input_and_starts_as_a_relu():
    bare = FilterResponseNorm(4, tlu=False).double()
    x = images()
    nu2 = x.square().mean((2, 3))
    near(bare(x).square().mean((2, 3)), nu2 / (nu2 + 1e-6))
    assert torch.equal(bare(-x), -bare(x))
    near(FilterResponseNorm(4).double()(x), torch.relu(bare(x)))


def test_frn_with_a_learned_eps():
    layer = FilterResponseNorm(4, tlu=False, learn_eps=True, dtype=torch.float64)
    near(layer(images()), reference.frn(images().numpy(), [1] * 4, [0] * 4, eps=1e-4 + 1e-6))
    with torch.no_grad():
        layer.eps.neg_()
    near(layer(images()), reference.frn(images().numpy(), [1] * 4, [0] * 4, eps=1e-4 + 1e-6))
    layer(images()).square().sum().backward()
    assert layer.eps.grad.abs().min() > 0


# -- RBN --------------------------------------------------------------------------------------------------------------
def test_rbn_by_the_formula_with_running_statistics():
    layer = shuffled(RepresentativeNorm(4))
    parameters = numbers(layer.weight, layer.bias, layer.centre, layer.scale_weight, layer.scale_bias)
    y, mean, var = reference.rbn(images().numpy(), *parameters)
    near(layer(images()), y)
    near(layer.running_mean, 0.1 * mean)
    near(layer.running_var, 0.9 + 0.1 * var * 90 / 89)
    assert layer.num_batches_tracked == 1


def test_rbn_starts_as_a_scaled_batch_norm():
    bn = shuffled(nn.BatchNorm2d(4))
    nn.init.zeros_(bn.bias)
    layer = RepresentativeNorm.like(copy.deepcopy(bn))
    for _ in range(2):
        near(layer(images()), 0.7310585786300049 * bn(images()))
    near(layer.eval()(images()), 0.7310585786300049 * bn.eval()(images()))


# -- SN ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("biased", [True, False])
def test_sn_by_the_formula(biased):
    layer = shuffled(SwitchableNorm(4, biased=biased))
    parameters = numbers(layer.weight, layer.bias, layer.mean_logits, layer.var_logits)
    y, mean, var = reference.sn(images().numpy(), *parameters, biased)
    near(layer(images()), y)
    near(layer.running_mean, 0.1 * mean)
    near(layer.running_var, 0.1 * var)


def test_sn_starts_at_zero_variance_unless_the_layer_before_it_has_gathered_some():
    bn = nn.BatchNorm2d(4).double()
    assert not SwitchableNorm.like(bn).running_var.any()
    bn(images(seed=3))
    near(SwitchableNorm.like(bn).running_var, bn.running_var)


@pytest.mark.parametrize("which", ["in", "ln", "bn"])
@pytest.mark.parametrize("training", [True, False])
def test_one_hot_sn_is_the_layer_it_chose(which, training):
    bn = nn.BatchNorm2d(4).double()
    bn(images(seed=3))
    layer = SwitchableNorm.like(bn, biased=True).train(training)
    with torch.no_grad():
        for logits in (layer.mean_logits, layer.var_logits):
            logits.copy_(torch.tensor([0.0 if k == which else -1e9 for k in ("in", "ln", "bn")]))
    one = {"in": nn.InstanceNorm2d(4), "ln": nn.GroupNorm(1, 4), "bn": bn.train(training)}[which].double()
    near(layer(images()), one(images()), atol=1e-10)


def test_the_references_divisor_shifts_outputs_by_about_one_in_2hw():
    x = images(3, 4, 16, 16)
    one, other = (SwitchableNorm(4, biased=b).double()(x) for b in (True, False))
    ratio = (one / other).detach()
    near(ratio, torch.full_like(ratio, 1 + 1 / (2 * 256)), atol=2e-3 / 2)


# -- IN ---------------------------------------------------------------------------------------------------------------
def test_in_is_group_norm_with_a_group_per_channel_and_the_same_in_evaluation():
    bn = shuffled(nn.BatchNorm2d(4))
    layer = instance_norm_like(bn)
    wanted = nn.functional.group_norm(images(), 4, bn.weight, bn.bias)
    near(layer(images()), wanted.detach())
    near(layer.eval()(images()), wanted.detach())
    assert list(layer.buffers()) == []


# -- PN ---------------------------------------------------------------------------------------------------------------
def test_pn_with_the_batchs_moments_is_batch_norm():
    bn = shuffled(nn.BatchNorm2d(4))
    layer = PopulationNorm.like(bn)
    x = images()
    with torch.no_grad():
        layer.mean.copy_(x.mean((0, 2, 3)))
        layer.log_var.copy_(x.var((0, 2, 3), unbiased=False).log())
    near(layer(x), bn(x).detach())


def test_pn_starts_from_running_statistics_and_treats_samples_independently():
    bn = nn.BatchNorm2d(4).double()
    fresh = PopulationNorm.like(bn)
    assert fresh.mean.tolist() == fresh.log_var.tolist() == [0.0] * 4
    bn(images(seed=4))
    layer = PopulationNorm.like(bn)
    near(layer(images()), bn.eval()(images()).detach())
    assert torch.equal(layer(images())[:1], layer(images()[:1]))


def test_pn_noise_is_for_training_and_scales_with_the_mean():
    layer = PopulationNorm(4, spread=0.5).double()
    x = images()
    assert torch.equal(layer(x), layer.eval()(x))  # the mean is 0: nothing to scale
    nn.init.constant_(layer.mean, 2.0)
    assert torch.equal(layer.eval()(x), layer(x))
    plain = layer(x)
    layer.train()
    torch.manual_seed(0)
    draws = torch.stack([(layer(x) - plain).mean((0, 2, 3)) for _ in range(2000)]).detach()
    near(draws.mean(), torch.tensor(0.0, dtype=torch.float64), atol=0.05)
    near(draws.std(), torch.tensor(1.0, dtype=torch.float64), atol=0.05)  # 2 * 0.5


# -- FBN's layer ------------------------------------------------------------------------------------------------------
def test_constant_statistics_do_not_see_the_batch():
    layer = shuffled(GlobalNorm(4))
    layer.mean.copy_(torch.arange(4.0))
    layer.var.copy_(torch.arange(1.0, 5.0))
    x = images()
    y = layer(x)
    near(y[:1], layer(x[:1]).detach())
    near(y, layer.eval()(x).detach())
    bn = nn.BatchNorm2d(4).double().eval()
    bn.load_state_dict({"running_mean": layer.mean, "running_var": layer.var}, strict=False)
    near(y, nn.functional.batch_norm(x, layer.mean, layer.var, layer.weight, layer.bias).detach())


def test_what_it_measures_is_exact_over_unequal_batches():
    layer = GlobalNorm(4).double()
    parts = [images(n, 4, 3, 3, seed=n) + n for n in (2, 5, 1)]
    for x in parts:
        layer(x)
    everything = torch.cat(parts)
    near(layer.seen_mean, everything.mean((0, 2, 3)))
    near(layer.seen_var, everything.var((0, 2, 3), unbiased=False))
    assert layer.seen == 8 * 9
    before = layer.seen_mean.clone()
    layer.eval()(images())
    assert torch.equal(layer.seen_mean, before)


def test_merging_is_the_law_of_total_variance():
    a, b = torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.float64) + 9
    seven = torch.tensor(7.0).double()
    got = merged_moments(a.mean(), a.var(unbiased=False), seven, b.mean(), b.var(unbiased=False), 4)
    both = torch.cat([a, b])
    near(got[0], both.mean())
    near(got[1], both.var(unbiased=False))


def test_a_test_with_batch_statistics_uses_the_batch_and_measures_nothing():
    layer = GlobalNorm(4).double()
    layer.sampling = False
    near(layer(images()), nn.BatchNorm2d(4).double()(images()).detach())
    assert layer.seen == 0
