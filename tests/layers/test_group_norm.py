"""Group normalization, removal of normalization, and the predicates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.layers import (
    AdaptiveGroupNorm,
    HybridNorm,
    MixedNorm,
    NormAct,
    group_norm_like,
    is_batchnorm,
    is_norm,
    keeps_statistics,
    no_norm_like,
    paper_groups,
)

MOBILENET_V2 = [16, 24, 32, 64, 96, 144, 160, 192, 320, 384, 576, 960, 1280]


@pytest.mark.parametrize("width", [*MOBILENET_V2, 64, 128, 256, 512])
def test_the_papers_groups_divide_every_width_of_its_networks(width):
    assert width % paper_groups(width) == 0


def test_group_norm_of_one_group_is_layer_norm_and_of_c_groups_instance_norm():
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    bn = nn.BatchNorm2d(6).double()
    torch.testing.assert_close(group_norm_like(bn, 1)(x), F.layer_norm(x, x.shape[1:]))
    torch.testing.assert_close(group_norm_like(bn, 6)(x), F.instance_norm(x))


def test_group_norm_like_keeps_affine_eps_and_has_no_buffers():
    bn = nn.BatchNorm2d(6, eps=1e-3).double().eval()
    nn.init.uniform_(bn.weight)
    new = group_norm_like(bn, 2)
    assert new.weight is bn.weight
    assert (new.eps, new.training) == (1e-3, False)
    assert not list(new.buffers())
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(new(x), F.group_norm(x, 2, bn.weight, bn.bias, eps=1e-3))
    plain = group_norm_like(nn.BatchNorm2d(6, affine=False), 2)
    assert not list(plain.parameters())
    assert plain(torch.randn(2, 6, 3, 3)).shape == (2, 6, 3, 3)


def test_group_norm_after_a_linear_layer():
    x = torch.randn(3, 8)
    torch.testing.assert_close(group_norm_like(nn.BatchNorm1d(8), 2)(x), F.group_norm(x, 2))


def test_a_width_that_does_not_divide_is_refused_by_name():
    with pytest.raises(BadInput, match=r'"layer1.0.bn1": 10 channels do not divide into 8 groups'):
        group_norm_like(nn.BatchNorm2d(10), name="layer1.0.bn1")
    with pytest.raises(BadInput, match="number of channels"):
        group_norm_like(nn.Linear(3, 3), 1)


def test_no_norm_is_the_identity_and_keeps_the_flag():
    new = no_norm_like(nn.BatchNorm2d(3).eval())
    assert isinstance(new, nn.Identity)
    assert not new.training


def test_fused_layers_keep_drop_and_activation():
    layers = pytest.importorskip("timm.layers")
    fused = layers.BatchNormAct2d(4, act_layer=nn.SiLU, drop_layer=nn.Dropout, inplace=False)
    x = torch.randn(2, 4, 3, 3)
    for new in (
        no_norm_like(fused),
        group_norm_like(fused, 2),
        HybridNorm.like(fused),
        MixedNorm.like(fused),
    ):
        assert isinstance(new, NormAct)
        assert new.act is fused.act
        assert new.drop is fused.drop
    torch.testing.assert_close(no_norm_like(fused.eval())(x), F.silu(x))
    torch.testing.assert_close(MixedNorm.like(fused.eval()).eval()(x), fused(x))
    assert isinstance(AdaptiveGroupNorm.like(fused), NormAct)


def test_predicates():
    ours = [AdaptiveGroupNorm(2), HybridNorm(2), MixedNorm(2)]
    batch = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    others = [nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm2d(2), nn.RMSNorm(2)]
    for module in (*ours, *batch, *others):
        assert is_norm(module), module
    assert all(is_batchnorm(module) for module in batch)
    assert not any(is_batchnorm(module) for module in (*ours, *others))
    assert all(keeps_statistics(module) for module in (*ours, *batch))
    assert not any(keeps_statistics(module) for module in others)
    assert not keeps_statistics(nn.BatchNorm2d(2, track_running_stats=False))
    assert keeps_statistics(nn.InstanceNorm2d(2, track_running_stats=True))
    for module in (
        nn.Conv2d(1, 1, 1),
        nn.Identity(),
        nn.Sequential(nn.BatchNorm2d(2)),
        NormAct(*[nn.ReLU()] * 3),
    ):
        assert not is_norm(module)


def test_predicates_know_timm_and_torchvision():
    layers = pytest.importorskip("timm.layers")
    ops = pytest.importorskip("torchvision.ops")
    assert is_batchnorm(layers.BatchNormAct2d(2))
    for module in (
        layers.GroupNormAct(2, num_groups=1),
        layers.LayerNorm2d(2),
        layers.GroupNorm1(2),
        layers.RmsNorm(2),
        layers.FilterResponseNormTlu2d(2),
        layers.EvoNorm2dS0(8),
        ops.FrozenBatchNorm2d(2),
    ):
        assert is_norm(module), module
        assert not is_batchnorm(module), module
