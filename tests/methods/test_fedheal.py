"""FedHEAL: consistent updates only, and weights from distances."""

import pytest
import torch

from fednorms.core.round import initial_state, server_update
from fednorms.core.states import Upload
from fednorms.core.tree import Tree
from tests.reference.fedheal import Server
from tests.support.tiny import close, play, same, tiny_data, tiny_task


def uploads_of(task, models):
    counters = {n: t for n, t in task.net.initial.items() if not t.is_floating_point()}
    return [
        Upload(k, 1.0, Tree({**model, **counters}), {}, {"loss": 0.0}) for k, model in zip("abc", models, strict=True)
    ]


@pytest.mark.parametrize(("tau", "beta"), [(0.3, 0.4), (0.6, 1.0), (0.0, 0.0)])
def test_the_server_is_the_references(tau, beta):
    torch.manual_seed(0)
    task = tiny_task(f"fedheal(tau={tau}, beta={beta})", tiny_data())
    state = initial_state(task)
    floats = {n: t for n, t in state.model.items() if t.is_floating_point()}
    params = [n for n in floats if "running" not in n]
    places, at = {}, 0
    for n, t in floats.items():
        places[n] = range(at, at + t.numel())
        at += t.numel()
    flat = torch.cat([t.flatten() for t in floats.values()]).tolist()
    reference = Server(flat, [places[n] for n in params], 3, tau, beta)
    for _ in range(4):
        moves = [{n: torch.randn_like(t) for n, t in floats.items()} for _ in range(3)]
        models = [{n: state.model[n] + (t.abs() if "var" in n else t) for n, t in move.items()} for move in moves]
        state = server_update(task, state, uploads_of(task, models))
        reference.round([torch.cat([m[n].flatten() for n in floats]).tolist() for m in models])
        found = torch.cat([state.model[n].flatten() for n in floats])
        torch.testing.assert_close(found, torch.tensor(reference.model, dtype=torch.float64), atol=1e-9, rtol=0)


def test_without_a_threshold_and_distances_it_is_the_plain_mean():
    """tau=0 still drops an entry that moves in a direction for the first time, so one round is compared."""
    close(play("fedheal(beta=0)", n=1).model, play("fedavg", n=1, weighting="uniform").model, atol=1e-12)


def test_a_client_that_turns_around_is_dropped_there():
    task = tiny_task("fedheal(tau=0.5)", tiny_data())
    state = initial_state(task)
    floats = {n: t for n, t in state.model.items() if t.is_floating_point()}

    def moved(by):
        return {n: t + (by if n == "head.bias" else 0) for n, t in state.model.items() if n in floats}

    state = server_update(task, state, uploads_of(task, [moved(1.0), moved(1.0), moved(1.0)]))
    before = state.model["head.bias"]
    state = server_update(task, state, uploads_of(task, [moved(-5.0), moved(2.0), moved(2.0)]))
    torch.testing.assert_close(state.model["head.bias"], before + 2.0)


def test_the_order_of_uploads_changes_no_bit():
    data = tiny_data()
    run = play("fedheal", data, n=2)
    assert same(run.model, play("fedheal", dict(reversed(data.items())), n=2).model)


def test_a_client_whose_name_begins_another_has_its_own_history():
    plain = tiny_data()
    data = dict(zip(("a", "a/b", "c"), plain.values(), strict=True))
    run = play("fedheal", data, n=2, cohorts=[["a/b", "c"], ["a", "a/b"]], batch_size=50)
    wanted = play("fedheal", plain, n=2, cohorts=[["b", "c"], ["a", "b"]], batch_size=50)
    close(run.model, wanted.model)
