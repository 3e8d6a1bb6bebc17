"""FixBN: frozen statistics in the second half of training."""

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.tree import Tree, mean
from tests.reference.fedavg import average
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def test_statistics_stop_bit_for_bit_at_the_switch_and_affine_continues():
    data = tiny_data()
    task = tiny_task("fixbn", data, rounds=4)
    run, seen = None, []
    for _ in range(4):
        run = rounds(task, data, 1, run=run)
        seen.append(run.model)
    assert not torch.equal(seen[0]["norm.running_var"], seen[1]["norm.running_var"])
    for later in seen[2:]:
        assert all(torch.equal(seen[1][k], later[k]) for k in STATISTICS)
    assert not torch.equal(seen[2]["norm.weight"], seen[3]["norm.weight"])
    assert not torch.equal(seen[2]["norm.bias"], seen[3]["norm.bias"])


def test_averaging_equal_statistics_would_move_their_last_bit_and_does_not():
    data = tiny_data(4, 5, 6, 7)
    model = tiny_net()
    model.norm.running_var.copy_(torch.tensor([0.1, 0.7, 1.3, 2.9], dtype=torch.float64))
    kept = model.norm.running_var.clone()
    sizes = [float(len(s)) for s in data.values()]
    assert not torch.equal(mean([Tree(v=kept)] * 4, sizes)["v"], kept)  # not a vacuous test
    assert torch.equal(play("fixbn(switch=0)", data, model=model).model["norm.running_var"], kept)


def test_the_first_half_is_fedavg_and_switch_one_always_is():
    assert same(play("fixbn", n=2).model, play("fedavg", n=2).model)
    assert same(play("fixbn(switch=1)", n=4).model, play("fedavg", n=4).model)


def test_the_switch_is_the_floor_of_the_fraction():
    for rounds_, switch, first in [(4, 0.5, 2), (5, 0.5, 2), (100, 0.29, 29), (10, 0.7, 7), (3, 0.0, 0)]:
        task = tiny_task(f"fixbn(switch={switch})", tiny_data(), rounds=rounds_)
        part = task.method.parts[0]

        class At:
            rounds = rounds_

        def frozen(t, part=part, At=At):
            At.round = t
            return part.path(At)

        assert [t for t in range(rounds_) if frozen(t)] == list(range(first, rounds_))


def test_switch_zero_trains_with_the_initial_statistics_as_constants():
    data = tiny_data()
    task = tiny_task("fixbn(switch=0)", data)
    states = []
    for (x, y), name in zip(pairs(data), "abc", strict=True):
        local = tiny_net().train()
        local.norm.eval()
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        for rows in plan_of(task, data[name], name, 0):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(x[rows]), y[rows]).backward()
            optimizer.step()
        states.append(local.state_dict())
    close(rounds(task, data, 1).model, average(states, [len(s) for s in data.values()]))


def test_frozen_training_output_is_independent_of_the_batch():
    task = tiny_task("fixbn(switch=0)", tiny_data())
    x = tiny_data()["a"].x
    tensors = task.net.initial.clone()
    kw = {"train": True, "batch_statistics": False}
    together, _ = task.net.forward(tensors, x, **kw)
    alone, _ = task.net.forward(tensors, x[:1], **kw)
    tested, _ = task.net.forward(tensors, x, train=False, batch_statistics=False)
    torch.testing.assert_close(together[:1], alone, atol=1e-14, rtol=0)
    assert torch.equal(together, tested)
    assert same(tensors, task.net.initial)


def test_dropout_stays_on_when_statistics_are_frozen():
    model = tiny_net()
    model.pool = nn.Sequential(model.pool, nn.Dropout(0.5))
    task = tiny_task("fixbn(switch=0)", tiny_data(), model=model)
    kw = {"batch_statistics": False}
    x = tiny_data()["a"].x
    trained, _ = task.net.forward(task.net.initial.clone(), x, train=True, **kw)
    tested, _ = task.net.forward(task.net.initial.clone(), x, train=False, **kw)
    assert not torch.equal(trained, tested)


def test_needs_batch_normalization():
    with pytest.raises(BadInput, match=r"fixbn has nothing to act on.*no BatchNorm layer"):
        tiny_task("gn(groups=2) + fixbn", tiny_data())
