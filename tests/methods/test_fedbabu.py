"""FedBABU: a head that never moves."""

import pytest
import torch

from fednorms.core.part import Route
from fednorms.core.round import begin, broadcast, train
from fednorms.core.states import Client
from tests.reference.fedavg import fedavg
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_the_head_is_bit_identical_on_server_and_never_sent():
    run, start = play("fedbabu", n=3, weight_decay=0.1, momentum=0.9), tiny_net().state_dict()
    for name in ("head.weight", "head.bias"):
        assert torch.equal(run.model[name], start[name])
        assert name not in run.uploads["a"].model
    assert not run.states["a"].local


def test_the_body_moves_as_in_fedavg_with_a_fixed_head():
    data = tiny_data()
    task = tiny_task("fedbabu", data, epochs=2)
    model = tiny_net()
    model.head.requires_grad_(False)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(2)]
    wanted = fedavg(model, pairs(data), plans, 0.1).state_dict()
    close(rounds(task, data, 2).model, wanted)


def test_a_users_own_frozen_tensors_are_constants_too():
    model = tiny_net()
    model.conv.requires_grad_(False)
    task = tiny_task("fedavg", tiny_data(), model=model)
    assert task.net.routes["conv.weight"] is Route.FROZEN
    run = rounds(task, tiny_data(), 2)
    assert "conv.weight" not in run.uploads["a"].model
    assert torch.equal(run.model["conv.weight"], model.conv.weight)


@pytest.mark.parametrize("lr", [0.0, 0.01])
def test_fine_tuning_moves_body_and_head(lr):
    data = tiny_data()
    task = tiny_task(f"fedbabu(epochs=2, lr={lr})", data)
    run = rounds(task, data, 2)
    carry, _ = begin(task, broadcast(task, run.server), Client("a", data["a"]), evaluating=True)
    train(task, carry, task.method.evaluation().phases)
    moved = {k for k, v in carry.model().items() if not torch.equal(v, run.model[k])}
    params = {"conv.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert moved & params == (params if lr else set())


def test_extrapolation_and_variates_cover_the_body_only():
    data = tiny_data()
    run = play("fedexp + fedbabu", data, n=1)
    body = [k for k in run.uploads["a"].model if "norm.r" not in k and "tracked" not in k]
    for name in "abc":
        moved = sum(float((run.uploads[name].model[k] - tiny_net().state_dict()[k]).square().sum()) for k in body)
        assert float(run.uploads[name].parts["fedexp"]["sqnorm"]) == pytest.approx(moved, rel=1e-12)


def test_zero_epochs_is_no_fine_tuning():
    assert tiny_task("fedbabu(epochs=0)", tiny_data()).method.evaluation().phases == ()
    assert same(play("fedbabu(epochs=0)").model, play("fedbabu").model)
