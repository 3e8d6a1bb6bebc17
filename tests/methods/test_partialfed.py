"""PartialFed: what a client loads of the server's model."""

from dataclasses import replace

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.core.round import broadcast
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.methods.registry import method
from fednorms.models import build
from tests.support.tiny import Run, client_model, play, rounds, same, setup, tiny_data, tiny_net, tiny_task
from tests.support.tiny_parts import negating_and_doubling

KEPT = {
    "no_bn_no_head": {"norm", "head"},
    "no_bn": {"norm"},
    "bottom_up": {"head"},
    "top_down": {"conv", "norm"},
    "adaptive": {"conv", "norm", "head"},
}


@pytest.mark.parametrize("strategy", KEPT)
def test_what_is_not_loaded_is_still_sent(strategy):
    run = play(f"partialfed(strategy={strategy})", n=2)
    assert {n.split(".")[0] for n in run.states["a"].local} == KEPT[strategy]
    assert set(run.uploads["a"].model) == set(tiny_net().state_dict())
    assert not torch.equal(run.model["head.weight"], tiny_net().head.weight)


def test_no_bn_with_all_clients_gives_fedbns_client_models():
    data = tiny_data()
    ours, fedbn = (tiny_task(t, data, weighting="size") for t in ("partialfed(strategy=no_bn)", "fedbn"))
    a, b = rounds(ours, data, 3), rounds(fedbn, data, 3)
    for name in data:
        assert same(client_model(ours, data, a, name), client_model(fedbn, data, b, name))


def test_loading_nothing_is_standalone():
    data = tiny_data()
    ours, alone = (tiny_task(t, data) for t in ("partialfed(strategy=bottom_up, m=0)", "standalone"))
    a, b = rounds(ours, data, 3), rounds(alone, data, 3)
    for name in data:
        assert same(client_model(ours, data, a, name), client_model(alone, data, b, name))


def test_loading_everything_is_fedavg():
    # The fixed strategies refuse to be FedAvg; the adaptive one with all its logits far on one side is.
    data = tiny_data()
    task = tiny_task("partialfed(strategy=adaptive)", data)
    run = setup(task, data)
    for _ in range(3):
        run = decided(rounds(task, data, 1, run=run), load=True)
    assert same(run.model, play("fedavg", data, n=3).model)


def test_the_adaptive_strategy_that_keeps_everything_is_standalone():
    data = tiny_data()
    task, alone = tiny_task("partialfed(strategy=adaptive)", data), tiny_task("standalone", data)
    run = setup(task, data)
    for _ in range(3):
        run = decided(rounds(task, data, 1, run=run), load=False)
    other = rounds(alone, data, 3)
    for name in data:
        assert same(run.states[name].local, other.states[name].local)


def decided(run: Run, load: bool) -> Run:
    """The same run with all clients' logits far on one side."""
    far = torch.tensor([-50.0, 50.0] if load else [50.0, -50.0]).double()
    states = {
        k: replace(s, parts={"partialfed": Tree({u: far for u in s.parts["partialfed"]})})
        for k, s in run.states.items()
    }
    return Run(run.server, states, run.uploads)


def test_logits_move_with_both_copies_frozen_and_stay_with_the_client():
    data = tiny_data()
    task = tiny_task("partialfed(strategy=adaptive, choice_rate=5.0)", data)
    one = rounds(task, data, 1)
    q = one.states["a"].parts["partialfed"]
    assert q.keys() == {"conv", "norm", "head"}
    assert all(not v.any() for v in q.values())  # both copies are the same in a client's first round
    two = rounds(task, data, 1, run=one)
    moved = two.states["a"].parts["partialfed"]
    assert any(v.any() for v in moved.values())
    # The gradient of a softmax sums to zero, so the two logits of a layer move apart by the same amount.
    assert all(abs(float(v.sum())) < 1e-9 for v in moved.values())
    assert not two.uploads["a"].parts.get("partialfed")


def test_a_hard_choice_mixes_whole_layers():
    data = tiny_data()
    task = tiny_task("partialfed(strategy=adaptive)", data)
    run = rounds(task, data, 2)
    q = {"conv": [1.0, 0.0], "norm": [0.0, 1.0], "head": [0.0, 0.0]}  # keep, load, and a tie, which loads
    state = run.states["a"]
    chosen = Tree({u: torch.tensor(v).double() for u, v in q.items()})
    states = {**run.states, "a": replace(state, parts={"partialfed": chosen})}
    held = client_model(task, data, Run(run.server, states), "a")
    sent = broadcast(task, run.server).model
    for name in held:
        source = state.local if name.split(".")[0] == "conv" else sent
        assert torch.equal(held[name], source[name])


def test_the_choice_helps_on_a_case_where_loading_hurts():
    # The server's head is noise: after some rounds of choosing, the client prefers its own.
    data = tiny_data(24, 20)
    task = tiny_task("partialfed(strategy=adaptive, choice_rate=1.0, temperature=1.0)", data, epochs=4)
    run = rounds(task, data, 1)
    bad = Tree({**run.model, "head.weight": 50 * torch.randn(3, 16, dtype=torch.float64)})
    run = Run(replace(run.server, model=bad), run.states)
    again = rounds(task, data, 1, run=run, cohorts=["a"])
    keep, load = again.states["a"].parts["partialfed"]["head"]
    assert keep > load


def test_other_parts_local_tensors_are_never_mixed():
    data = tiny_data()
    task = tiny_task("silobn + partialfed(strategy=adaptive)", data)
    run = rounds(task, data, 2)
    held = client_model(task, data, run, "a")
    assert torch.equal(held["norm.running_mean"], run.states["a"].local["norm.running_mean"])


def test_blocks_are_counted_from_either_end():
    for strategy, kept in (("bottom_up", {"fc1", "fc2", "head"}), ("top_down", {"conv1", "norm1", "conv2", "norm2"})):
        m = 2 if strategy == "bottom_up" else 3
        net = Net(
            build("lenet", classes=3, channels=3, size=32, seed=0), method(f"partialfed(strategy={strategy}, m={m})")
        )
        assert {n.split(".")[0] for n, r in net.routes.items() if r is Route.SENT} == kept


def test_nothing_to_keep_is_an_error():
    with pytest.raises(BadInput, match="nothing to act on"):
        tiny_task("partialfed(strategy=bottom_up, m=2)", tiny_data())


ADAPTIVE = "partialfed(strategy=adaptive, choice_rate=5.0)"


def logits(run):
    return Tree({f"{k}/{u}": q for k, s in run.states.items() for u, q in s.parts["partialfed"].items()})


def test_the_choice_sees_images_as_training_transforms_them():
    data = tiny_data()
    negated = {k: Split(1 - s.x, s.y) for k, s in data.items()}
    with negating_and_doubling() as (negate, _):
        ours = play(negate + method(ADAPTIVE), data, n=3)
    plain = play(ADAPTIVE, negated, n=3)
    assert same(ours.model, plain.model)
    assert same(logits(ours), logits(plain))
    assert any(q.any() for q in logits(ours).values())


def test_the_choice_descends_the_objective_that_another_part_sets():
    def twice(logits, y):
        return 2 * torch.nn.functional.cross_entropy(logits, y)

    with negating_and_doubling() as (_, double):
        ours = play(double + method(ADAPTIVE), n=3)
    plain = play(ADAPTIVE, n=3, loss=twice)
    assert same(ours.model, plain.model)
    assert same(logits(ours), logits(plain))
    assert not same(logits(ours), logits(play(ADAPTIVE, n=3)))


@pytest.mark.parametrize("beside", ["fedrdn + augment", "fraug", "spherefed"])
def test_the_choice_runs_beside_parts_with_random_data_or_an_objective(beside):
    run = play(f"{beside} + {ADAPTIVE}", n=2)
    assert any(q.any() for q in logits(run).values())
    assert same(logits(run), logits(play(f"{beside} + {ADAPTIVE}", n=2)))
