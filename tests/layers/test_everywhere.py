"""What holds for every layer wherever it runs: in a captured graph, in functional_call, in the zoo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fednorms.core import noise
from fednorms.layers import (
    AdaptiveGroupNorm,
    FilterResponseNorm,
    GlobalNorm,
    HybridNorm,
    KeyedDropout,
    KeyedStochasticDepth,
    MixedNorm,
    PopulationNorm,
    RepresentativeNorm,
    SwitchableNorm,
    UnitNormLinear,
    WNConv2d,
    WSConv2d,
    adaptive_clip,
    group_norm_like,
    instance_norm_like,
    is_batchnorm,
    swap,
)

CHANNELS = 4
LAYERS = {
    "AdaptiveGroupNorm": lambda: AdaptiveGroupNorm(CHANNELS),
    "AdaptiveGroupNorm, author": lambda: AdaptiveGroupNorm(CHANNELS, variant="author"),
    "AdaptiveGroupNorm, hard": lambda: AdaptiveGroupNorm(CHANNELS, eval_mode="hard"),
    "HybridNorm": lambda: HybridNorm(CHANNELS),
    "MixedNorm, learned": lambda: MixedNorm(CHANNELS, kind="learned"),
    "MixedNorm, ensemble": lambda: MixedNorm(CHANNELS, kind="ensemble"),
    "FilterResponseNorm": lambda: FilterResponseNorm(CHANNELS, learn_eps=True),
    "GlobalNorm": lambda: GlobalNorm(CHANNELS),
    "InstanceNorm": lambda: instance_norm_like(nn.BatchNorm2d(CHANNELS)),
    "PopulationNorm": lambda: PopulationNorm(CHANNELS, spread=0.1),
    "RepresentativeNorm": lambda: RepresentativeNorm(CHANNELS),
    "SwitchableNorm": lambda: SwitchableNorm(CHANNELS),
    "WNConv2d": lambda: WNConv2d(CHANNELS, 3, 3),
    "WSConv2d": lambda: WSConv2d(CHANNELS, 3, 3),
    "UnitNormLinear": lambda: UnitNormLinear(6, 3),
    "KeyedDropout": lambda: KeyedDropout(0.5),
    "KeyedStochasticDepth": lambda: KeyedStochasticDepth(0.5),
    "GroupNorm": lambda: group_norm_like(nn.BatchNorm2d(CHANNELS), 2),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_no_layer_reads_a_tensor_on_the_host(make, training):
    # Tensors of the meta device hold no values: reading one, or branching on one, raises.
    layer = make().to("meta").train(training)
    x = torch.randn(2, CHANNELS, 6, 6, device="meta", requires_grad=True)
    with noise.keyed(torch.zeros(2, dtype=torch.long, device="meta")):
        layer(x).sum().backward()


def test_clipping_reads_nothing_on_the_host():
    grad = torch.randn(3, 4, device="meta")
    assert adaptive_clip(grad, grad, 0.1).shape == (3, 4)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_inputs_are_untouched_and_float64_and_shape_kept(make):
    layer = make().double()
    x = torch.randn(2, CHANNELS, 6, 6, dtype=torch.float64)
    version = x._version
    y = layer(x)
    assert x._version == version
    assert y.dtype == torch.float64
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_functional_call_writes_only_into_the_tensors_it_is_given(make):
    layer, x = make(), torch.randn(2, CHANNELS, 6, 6)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    given = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    with noise.keyed(torch.tensor([1, 2])):
        y = torch.func.functional_call(layer, given, (x,))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with noise.keyed(torch.tensor([1, 2])):
        assert torch.equal(layer(x), y)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, given[name]), name


@pytest.mark.parametrize("name", ["levit_128s", "mobilevit_xxs"])
@pytest.mark.parametrize(
    "make",
    [
        AdaptiveGroupNorm.like,
        HybridNorm.like,
        MixedNorm.like,
        GlobalNorm.like,
        PopulationNorm.like,
        RepresentativeNorm.like,
        SwitchableNorm.like,
    ],
    ids=["agn", "hbn", "mixed", "fbn", "pn", "rbn", "sn"],
)
def test_attention_networks_train_with_every_norm(name, make):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 64} if name.startswith("levit") else {}
    model = timm.create_model(name, num_classes=3, **options)
    assert swap(model, is_batchnorm, lambda old, key: make(old, name=key))
    loss = model(torch.randn(2, 3, 64, 64)).square().sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
