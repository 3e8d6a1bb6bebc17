"""FedAvg: the mean of models, and nothing else."""

import pytest
import torch
from torch import nn

from fednorms.core.tree import Tree
from tests.reference.fedavg import fedavg
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def plans(task, data, n):
    return [[plan_of(task, split, name, t) for name, split in data.items()] for t in range(n)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 0.5},
        {"weighting": "uniform", "last": "fill"},
        {"steps": 3, "last": "drop"},
    ],
)
def test_equals_a_plain_torch_loop_over_three_rounds(settings):
    data = tiny_data()
    task = tiny_task("fedavg", data, **settings)
    known = {k: settings[k] for k in ("momentum", "weight_decay", "clip") if k in settings}
    wanted = fedavg(tiny_net(), pairs(data), plans(task, data, 3), 0.1, uniform="weighting" in settings, **known)
    close(rounds(task, data, 3).model, wanted.state_dict())


def test_the_counters_are_integers_of_the_first_participant():
    run = play("fedavg", n=1)
    assert run.model["norm.num_batches_tracked"].dtype == torch.int64
    assert run.model["norm.num_batches_tracked"] == run.uploads["a"].model["norm.num_batches_tracked"] == 3


def test_one_participant_gives_back_its_model_exactly():
    run = play("fedavg", tiny_data(9), n=2)
    assert same(run.model, run.uploads["a"].model)


def test_arrival_order_does_not_matter():
    data = tiny_data()
    backwards = dict(reversed(data.items()))
    assert same(play("fedavg", data).model, play("fedavg", backwards).model)


def test_identical_clients_give_the_model_of_one():
    split = tiny_data(4)["a"]
    data = {"a": split, "b": split}
    task = tiny_task("fedavg", data)  # one full batch per epoch: the row order only permutes a sum
    run = rounds(task, data, 1)
    close(run.model, run.uploads["a"].model, atol=1e-12)


def test_one_full_batch_step_without_normalization_is_a_step_on_the_pooled_loss():
    data = tiny_data()
    task = tiny_task("nonorm", data, batch_size=100)
    run = rounds(task, data, 1)
    model = tiny_net()
    model.norm = nn.Identity()
    x, y = torch.cat([s.x for s in data.values()]), torch.cat([s.y for s in data.values()])
    nn.functional.cross_entropy(model(x), y).backward()
    wanted = Tree({n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters()})
    close(run.model, wanted, atol=1e-12)


def test_with_batch_normalization_that_equality_fails():
    data = tiny_data()
    run = play("fedavg", data, n=1, batch_size=100)
    model = tiny_net()
    x, y = torch.cat([s.x for s in data.values()]), torch.cat([s.y for s in data.values()])
    nn.functional.cross_entropy(model(x), y).backward()
    assert (run.model["conv.weight"] - model.conv.weight + 0.1 * model.conv.weight.grad).abs().max() > 1e-6


def test_rate_zero_moves_statistics_only():  # float32, because the mean is taken in float64
    run = play("fedavg", n=1, lr=0.0, model=tiny_net(dtype=torch.float32), dtype=torch.float32)
    start = tiny_net(dtype=torch.float32).state_dict()
    moved = {k for k in start if not torch.equal(start[k], run.model[k])}
    assert moved == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_the_weighted_mean_of_what_clients_sent():
    run = play("fedavg", tiny_data(3, 9), n=1)
    a, b = (run.uploads[k].model["conv.weight"] for k in "ab")
    torch.testing.assert_close(run.model["conv.weight"], (3 * a + 9 * b) / 12, atol=1e-15, rtol=0)
    assert run.uploads["b"].weight == 9.0


def test_every_round_has_another_order():
    data = tiny_data(12)
    task = tiny_task("fedavg", data)
    assert plan_of(task, data["a"], "a", 0) != plan_of(task, data["a"], "a", 1)
