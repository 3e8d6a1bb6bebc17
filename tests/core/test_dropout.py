"""Dropout and stochastic depth with keyed masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.layers import KeyedDropout, KeyedDropout2d, KeyedStochasticDepth, replace_dropout

KEY = torch.tensor([12, 34])


def drawn(layer, x, key=KEY):
    with noise.keyed(key):
        return layer(x)


@pytest.mark.parametrize("cls", [KeyedDropout, KeyedDropout2d, KeyedStochasticDepth])
def test_masks_are_keyed_scaled_and_off_in_evaluation(cls):
    x = torch.ones(64, 8, 2, 2)
    layer = cls(0.25, stream=3)
    y = drawn(layer, x)
    assert torch.equal(y, drawn(layer, x))
    assert not torch.equal(y, drawn(layer, x, torch.tensor([12, 35])))
    assert not torch.equal(y, drawn(cls(0.25, stream=4), x))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(layer.eval()(x), x)
    assert torch.equal(cls(0.0)(x), x)
    assert torch.equal(drawn(cls(1.0), x), torch.zeros_like(x))


def test_the_drop_rate_is_p():
    y = drawn(KeyedDropout(0.3, stream=1), torch.ones(20000))
    assert abs((y == 0).float().mean().item() - 0.3) < 4 * (0.3 * 0.7 / 20000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_mask_does_not_depend_on_the_dtype(dtype):
    layer = KeyedDropout(0.5, stream=1)
    got = drawn(layer, torch.ones(100, dtype=dtype))
    assert got.dtype == dtype
    assert torch.equal(got.float(), drawn(layer, torch.ones(100)))


def test_what_is_dropped_together():
    x = torch.ones(16, 8, 2, 2)
    channels = drawn(KeyedDropout2d(0.5, stream=1), x)
    assert torch.equal(channels, channels[:, :, :1, :1].expand_as(x))
    rows = drawn(KeyedStochasticDepth(0.5, stream=1), x)
    assert torch.equal(rows, rows[:, :1, :1, :1].expand_as(x))
    batch = drawn(KeyedStochasticDepth(0.5, stream=1, mode="batch"), x)
    assert batch.unique().numel() == 1
    unscaled = drawn(KeyedStochasticDepth(0.5, stream=1, scale=False), x)
    assert set(unscaled.unique().tolist()) == {0.0, 1.0}


def test_gradient_is_the_mask():
    x = torch.ones(50, requires_grad=True)
    y = drawn(KeyedDropout(0.5, stream=1), x)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_a_bad_probability_is_refused():
    with pytest.raises(BadInput, match=r"between 0 and 1, got 1\.5"):
        KeyedDropout(1.5)


def test_replace_dropout_gives_each_layer_the_stream_of_its_name():
    net = nn.ModuleDict(
        {
            "a": nn.Dropout(0.5),
            "b": nn.Sequential(nn.Dropout2d(0.1), nn.Dropout1d(0.2), nn.Dropout(0.0)),
        }
    ).eval()
    changes = replace_dropout(net)
    assert [change.name for change in changes] == ["a", "b.0", "b.1"]
    assert (net["a"].p, net["a"].stream) == (0.5, noise.stream("a"))
    assert net["b"][1].stream == noise.stream("b.1")
    assert isinstance(net["b"][0], KeyedDropout2d)
    assert type(net["b"][2]) is nn.Dropout
    assert not net["a"].training
    assert replace_dropout(net) == []


def test_replace_dropout_knows_stochastic_depth():
    ops = pytest.importorskip("torchvision.ops")
    layers = pytest.importorskip("timm.layers")
    net = nn.Sequential(
        ops.StochasticDepth(0.2, "batch"), layers.DropPath(0.1, scale_by_keep=False), layers.DropPath(0.0)
    )
    assert len(replace_dropout(net)) == 2
    assert (net[0].p, net[0].mode, net[0].scale) == (0.2, "batch", True)
    assert (net[1].p, net[1].mode, net[1].scale) == (0.1, "row", False)
