"""FedDG-GA: weights follow the rise of each client's loss by averaging."""

import copy

import pytest
import torch
from torch import nn

from tests.reference.fedavg import average, train
from tests.support.tiny import (
    client_model,
    close,
    pairs,
    plan_of,
    play,
    rounds,
    same,
    tiny_data,
    tiny_net,
    tiny_task,
)


def loss_of(model, x, y):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(x), y))


def reference(model, clients, plans, lr, step, total):
    """The authors' loop, with the gap known one round later."""
    server, n = copy.deepcopy(model), len(clients)
    weights, before = [1 / n] * n, None
    for t, plan in enumerate(plans):
        received = [loss_of(server, x, y) for x, y in clients]
        local = [train(copy.deepcopy(server), x, y, b, lr) for (x, y), b in zip(clients, plan, strict=True)]
        if before:
            gaps = [a - b for a, b in zip(received, before, strict=True)]
            most = max(abs(g) for g in gaps)
            raw = [w + step / n * (1 - t / total) * g / most for w, g in zip(weights, gaps, strict=True)]
            raw = [min(max(w, 0.0), 1.0) for w in raw]
            weights = [w / sum(raw) for w in raw]
        states = [copy.deepcopy(m.state_dict()) for m in local]
        before = [loss_of(m, x, y) for m, (x, y) in zip(local, clients, strict=True)]
        server.load_state_dict(average(states, weights))
    return server, weights


@pytest.mark.parametrize("step", [0.2, 3.0])
def test_equals_a_plain_torch_loop(step):
    data = tiny_data()
    task = tiny_task(f"feddgga(step={step})", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(4)]
    server, weights = reference(tiny_net(), pairs(data), plans, 0.1, step, total=4)
    run = rounds(task, data, 4)
    assert [float(run.server.parts["feddgga"][k]) for k in data] == pytest.approx(weights, abs=1e-10)
    close(run.model, server.state_dict())


def test_without_a_step_weights_are_equal():
    assert same(play("feddgga(step=0)").model, play("fedavg", weighting="uniform").model)


def test_the_received_model_has_what_the_client_kept_before_it_trained_again():
    """With FedBN: the gap is what averaging did to the client's model, not what this round's training did."""
    data = tiny_data()
    task = tiny_task("feddgga + fedbn", data)
    before = rounds(task, data, 2)
    after = rounds(task, data, 1, run=before)
    for k, (x, y) in zip(data, pairs(data), strict=True):
        start = tiny_net()
        start.load_state_dict(client_model(task, data, before, k))
        last = float(before.states[k].parts["feddgga"]["loss"])
        assert float(after.uploads[k].parts["feddgga"]["gap"]) == pytest.approx(loss_of(start, x, y) - last, abs=1e-10)


def test_absent_clients_keep_their_weight():
    run = play("feddgga(step=1)", n=3, cohorts=[["a", "b", "c"], ["a", "b"], ["a", "b"]])
    kept = run.server.parts["feddgga"]
    assert float(kept["c"]) == pytest.approx(1 / 3)
    assert sum(map(float, kept.values())) == pytest.approx(1.0)
    assert float(kept["a"]) != float(kept["b"])
