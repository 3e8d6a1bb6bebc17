"""ANFR: scaled weight standardization with channel attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.layers.channel_attention import ChannelAttention
from fednorms.methods.registry import method
from fednorms.models import build
from tests.support.tiny import close, play, tiny_data, tiny_net


def standardized(conv):
    """Each filter minus its mean, over the root of its fan-in times its unbiased variance, times its gain."""
    rows = []
    for w, gain in zip(conv.weight, conv.gain, strict=True):
        v = ((w - w.mean()) ** 2).sum() / (w.numel() - 1)
        rows.append(gain * (w - w.mean()) / (w.numel() * v).clamp(min=1e-4).sqrt())
    return torch.stack(rows)


def test_equals_the_formula_on_a_tiny_network():
    net = Net(tiny_net(), method("anfr(ratio=2, gain=1.5)"), dtype=torch.float64).module
    x = torch.rand(5, 3, 8, 8, dtype=torch.float64)
    a = F.conv2d(x, standardized(net.conv), net.conv.bias, padding=1)
    out = torch.empty_like(a)
    for n in range(5):
        z = torch.stack([channel.mean() for channel in a[n]])
        s = 1.5 / (1 + torch.exp(-net.norm.expand.weight @ (net.norm.squeeze.weight @ z).clamp(min=0)))
        for c in range(4):
            out[n, c] = a[n, c] * s[c]
    torch.testing.assert_close(net(x), net.head(net.pool(torch.relu(out)).flatten(1)), atol=1e-12, rtol=0)
    assert net.norm.squeeze.weight.shape == (2, 4)


def test_gates_of_zero_weights_with_gain_two_are_no_gates():
    one, other = (
        Net(tiny_net(), method(text), dtype=torch.float64).module for text in ("anfr(gain=2)", "nonorm + wsconv")
    )
    nn.init.zeros_(one.norm.expand.weight)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize(("model", "gates"), [("resnet20", 9), ("cnn-small", 3)])
def test_a_gate_ends_each_residual_branch(model, gates):
    net = Net(build(model, 10), method("anfr")).module
    assert sum(isinstance(m, ChannelAttention) for m in net.modules()) == gates


def test_first_weights_depend_on_the_seed_and_on_the_layer_only():
    def gates(seed):
        net = Net(tiny_net(seed), method("anfr"), dtype=torch.float64).module
        return net.norm.squeeze.weight

    assert torch.equal(gates(0), gates(0))
    assert not torch.equal(gates(0), gates(1))


def test_it_has_no_statistics_so_batches_of_one_work():
    facts = fn.describe("anfr", "cnn-small")
    assert facts.batch_of_one
    assert not facts.mixes_batch
    assert facts.stateless_clients


def test_scaling_all_filters_changes_nothing():
    net = Net(tiny_net(), method("anfr"), dtype=torch.float64).module
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    before = net(x)
    with torch.no_grad():
        net.conv.weight.mul_(3.0)
    torch.testing.assert_close(net(x), before, atol=1e-12, rtol=0)


def test_a_network_without_norms_is_refused():
    with pytest.raises(BadInput, match="anfr"):
        play("nonorm + anfr", tiny_data())


def test_it_trains():
    run = play("anfr", n=2)
    start = Net(tiny_net(), method("anfr"), dtype=torch.float64).initial
    with pytest.raises(AssertionError):
        close({k: run.model[k] for k in start}, start)
