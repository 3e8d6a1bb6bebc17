"""LG-FedAvg: FedPer's mirror image."""

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.methods.registry import method
from fednorms.models import build
from tests.methods.test_fedper import C, D, Two, linear
from tests.support.tiny import client_model, ones, play, rounds, tiny_data, tiny_task


def shared(text, name, size=32):
    net = Net(build(name, classes=10, channels=3, size=size, seed=0), method(text), name=name)
    return {n.rpartition(".")[0] for n, r in net.routes.items() if r is Route.SHARED}


def test_a_linear_loss_has_its_closed_form():
    data, lr = ones(2, 2, 2), 0.1
    task = tiny_task("lgfedavg", data, model=Two(), loss=linear, steps=1, lr=lr)
    run = rounds(task, data, 1)
    torch.testing.assert_close(run.model["head.weight"].squeeze(), -0.25 - lr * D.mean(), atol=1e-12, rtol=0)
    for k, name in enumerate("abc"):
        held = client_model(task, data, run, name)
        torch.testing.assert_close(held["body.weight"].squeeze(), 0.5 - lr * C[k], atol=1e-12, rtol=0)
        assert torch.equal(held["head.weight"], run.model["head.weight"])


def test_after_a_round_the_top_is_shared_and_the_front_is_not():
    data = tiny_data()
    task = tiny_task("lgfedavg", data)
    run = rounds(task, data, 1)
    a, b = (client_model(task, data, run, n) for n in "ab")
    assert torch.equal(a["head.weight"], b["head.weight"])
    for name in ("conv.weight", "norm.weight", "norm.running_mean"):
        assert not torch.equal(a[name], b[name])
        assert name not in run.uploads["a"].model


def test_presets_and_explicit_layers():
    assert shared("lgfedavg", "lenet") == {"fc2", "head"}
    assert shared("lgfedavg", "cnn-small", 16) == {"head"}
    assert shared("lgfedavg", "torchvision:resnet18") == {"fc"}
    assert shared("lgfedavg(layers=3)", "lenet") == {"fc1", "fc2", "head"}
    assert shared("lgfedavg(shared='fc1, head')", "lenet") == {"fc1", "head"}


def test_a_norm_goes_with_the_layer_before_it():
    assert shared("lgfedavg(layers=4)", "lenet") == {"conv2", "norm2", "fc1", "fc2", "head"}


def test_two_layers_shared_is_fedavg_when_the_rest_agrees():
    # One client: whatever is shared, its model is the one that plain training gives.
    data = tiny_data(9)
    task = tiny_task("lgfedavg", data)
    run, plain = rounds(task, data, 3), play("fedavg", data, n=3)
    held = client_model(task, data, run, "a")
    assert all(torch.equal(held[n], plain.model[n]) for n in plain.model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lgfedavg(shared='head,fc9')", 'no module "fc9"'),
        ("lgfedavg(layers=9)", "nothing to act on"),
        ("lgfedavg(layers=-1)", "integer >= 0"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(BadInput, match=message):
        tiny_task(text, tiny_data())
