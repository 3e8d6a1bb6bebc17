"""Replacing layers by module type, in any model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fednorms.core.errors import BadInput
from fednorms.layers import (
    AdaptiveGroupNorm,
    Change,
    HybridNorm,
    MixedNorm,
    NormAct,
    UnitNormLinear,
    WNConv2d,
    WSConv2d,
    group_norm_like,
    is_batchnorm,
    is_norm,
    no_norm_like,
    swap,
)

# Numbers of batch normalization layers by counting the published layer tables, not by running our code.
BATCHNORMS = {
    "torchvision:resnet18": 20,
    "torchvision:resnet50": 53,
    "torchvision:vgg11_bn": 8,
    "torchvision:densenet121": 121,
    "torchvision:mobilenet_v2": 52,
    "torchvision:efficientnet_b0": 49,
    "torchvision:googlenet": 57,
    "torchvision:shufflenet_v2_x0_5": 56,
    "timm:resnet18": 20,
    "timm:efficientnet_lite0": 49,
}


def zoo(name: str) -> nn.Module:
    library, _, model = name.partition(":")
    # RegNet computes its widths with tensors, so it cannot be built without memory.
    with torch.device("cpu" if model.startswith("regnet") else "meta"):
        if library == "timm":
            return pytest.importorskip("timm").create_model(model, num_classes=5)
        models = pytest.importorskip("torchvision.models")
        options = {"aux_logits": False, "init_weights": False} if model == "googlenet" else {}
        return models.get_model(model, weights=None, num_classes=5, **options)


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    )


def test_swap_reports_every_change_in_order():
    net = small()
    changes = swap(net, is_batchnorm, lambda old, name: group_norm_like(old, 2, name))
    assert changes == [
        Change("1", "BatchNorm2d(4)", "GroupNorm(2, 4)"),
        Change("2.2", "BatchNorm2d(4)", "GroupNorm(2, 4)"),
    ]
    assert not any(is_batchnorm(module) for module in net.modules())
    assert swap(net, is_batchnorm, lambda old, name: nn.Identity()) == []


def test_swap_takes_a_type_or_several():
    assert len(swap(small(), nn.BatchNorm2d, lambda old, name: nn.Identity())) == 2
    assert len(swap(small(), (nn.BatchNorm2d, nn.ReLU), lambda old, name: nn.Identity())) == 3


def test_the_root_is_refused():
    with pytest.raises(BadInput, match="whole model"):
        swap(nn.BatchNorm2d(3), is_batchnorm, lambda old, name: nn.Identity())


def test_a_shared_module_is_replaced_once_and_stays_shared():
    norm = nn.BatchNorm2d(4)
    net = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Sequential(norm)})
    assert len(swap(net, is_batchnorm, lambda old, name: nn.GroupNorm(2, 4))) == 1
    assert net["a"] is net["b"] is net["c"][0]
    assert isinstance(net["a"], nn.GroupNorm)


def test_a_shared_block_is_visited_once():
    block = nn.Sequential(nn.BatchNorm2d(4))
    net = nn.ModuleDict({"a": block, "b": block})
    assert [change.name for change in swap(net, is_batchnorm, lambda old, name: nn.Identity())] == ["a.0"]


def test_nothing_inside_a_replacement_is_visited():
    net = nn.Sequential(nn.ReLU())
    assert len(swap(net, nn.ReLU, lambda old, name: nn.Sequential(old, nn.ReLU()))) == 1


def test_an_error_leaves_the_model_as_it_was():
    net = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(5))
    with pytest.raises(BadInput, match='"1"'):
        swap(net, is_batchnorm, lambda old, name: group_norm_like(old, 2, name))
    assert all(is_batchnorm(module) for module in net)


def test_layers_whose_extras_would_be_lost_are_refused():
    net = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 2, 3)))
    with pytest.raises(BadInput, match=r'"0".*parametrization'):
        swap(net, nn.Conv2d, lambda old, name: WNConv2d.like(old))
    net = nn.Sequential(nn.BatchNorm2d(2))
    net[0].register_forward_hook(lambda module, args, out: out)
    with pytest.raises(BadInput, match="hooks"):
        swap(net, is_batchnorm, lambda old, name: no_norm_like(old))


def test_tied_weights_of_two_convolutions_stay_tied():
    net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    net[1].weight = net[0].weight
    swap(net, nn.Conv2d, lambda old, name: WSConv2d.like(old))
    assert net[0].weight is net[1].weight


def test_a_model_after_surgery_can_be_copied_and_saved():
    net = small()
    swap(net, nn.Conv2d, lambda old, name: WSConv2d.like(old, name=name))
    swap(net, is_batchnorm, lambda old, name: AdaptiveGroupNorm.like(old, name=name))
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(net.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("name", BATCHNORMS)
def test_every_batchnorm_of_the_zoo_is_found(name):
    model = zoo(name)
    # Independent of our predicate: whatever holds a running mean is a batch normalization layer.
    owners = {key.removesuffix(".running_mean") for key in model.state_dict() if key.endswith(".running_mean")}
    found = {key for key, module in model.named_modules() if is_batchnorm(module)}
    assert found == owners
    assert len(found) == BATCHNORMS[name]
    changes = swap(model, is_batchnorm, lambda old, key: group_norm_like(old, 1, key))
    assert {change.name for change in changes} == owners
    assert not any(key.endswith(("running_mean", "running_var")) for key in model.state_dict())


@pytest.mark.parametrize(
    "name", ["timm:levit_128s", "timm:mobilevit_s", "torchvision:convnext_tiny", "torchvision:regnet_y_400mf"]
)
def test_removal_of_all_norms_leaves_none(name):
    model = zoo(name)
    before = sum(is_norm(module) for module in model.modules())
    assert before > 0
    assert len(swap(model, is_norm, lambda old, key: no_norm_like(old))) == before
    assert not any(is_norm(module) for module in model.modules())


def test_fused_layers_of_timm_keep_their_activation_through_swap():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("efficientnet_lite0", num_classes=3).eval()
    with torch.no_grad():
        for module in model.modules():
            if is_batchnorm(module):
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 2)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        other = copy.deepcopy(model)
        # MixedNorm and HybridNorm evaluate with the batch norm's own statistics: the same function.
        assert len(swap(model, is_batchnorm, lambda old, name: HybridNorm.like(old, name))) == 49
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        # A maker that forgets the activation: swap keeps it all the same.
        swap(other, is_batchnorm, lambda old, name: _bare(old))
        torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)
    assert any(isinstance(module, NormAct) for module in other.modules())


def _bare(old: nn.Module) -> nn.Module:
    new = MixedNorm(old.num_features, eps=old.eps).eval()
    new.load_state_dict(old.state_dict(), strict=False)
    return new


def test_fedwon_fednn_and_fedfn_surgeries_compose_on_resnet18():
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.resnet18(weights=None, num_classes=5)
    plain = sum(p.numel() for p in model.parameters())
    convs = swap(model, nn.Conv2d, lambda old, name: WSConv2d.like(old, name=name))
    swap(model, is_norm, lambda old, name: no_norm_like(old))
    swap(model, nn.Linear, lambda old, name: UnitNormLinear.like(old, bias=False, name=name))
    assert len(convs) == 20
    # 4800 channels in all: two affine values each go, one gain each comes, the head loses five biases.
    assert sum(p.numel() for p in model.parameters()) == plain - 2 * 4800 + 4800 - 5
    assert not list(model.buffers())
