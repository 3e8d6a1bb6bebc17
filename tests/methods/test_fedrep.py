"""FedRep: head first, then body."""

import pytest
import torch

from fednorms.core.round import base_phases
from fednorms.core.states import Client, context_of
from tests.reference.fedrep import fedrep
from tests.support.tiny import close, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_equals_a_plain_torch_loop_over_three_rounds(momentum):
    data = tiny_data()
    task = tiny_task("fedrep(head_epochs=2)", data, momentum=momentum)
    run = rounds(task, data, 3)
    plans = [
        [(plan_of(task, s, k, t, 0, epochs=2), plan_of(task, s, k, t, 1)) for k, s in data.items()] for t in range(3)
    ]
    server, heads = fedrep(tiny_net(), pairs(data), plans, 0.1, momentum)
    close(run.model, server.state_dict())
    for name, head in zip("abc", heads, strict=True):
        close(run.states[name].local, {f"head.{k}": v for k, v in head.items()})


def test_the_head_stays_with_the_client():
    run = play("fedrep(head_epochs=1)", n=2)
    assert run.states["a"].local.keys() == {"head.weight", "head.bias"}
    assert not {"head.weight", "head.bias"} & run.uploads["a"].model.keys()
    assert torch.equal(run.model["head.weight"], tiny_net().head.weight)
    assert not torch.equal(run.states["a"].local["head.weight"], run.states["b"].local["head.weight"])


def test_the_plan_is_head_then_body():
    task = tiny_task("fedrep(head_epochs=7)", tiny_data(), epochs=3)
    phases = base_phases(task, context_of(task, 0, Client("a", tiny_data()["a"])))
    assert [(p.epochs, p.train) for p in phases] == [(7, "head"), (3, "body")]


def test_what_another_part_planned_holds_in_both_phases_whatever_the_order():
    data = tiny_data()
    for text in ("fixbn(switch=0) + fedrep", "fedrep + fixbn(switch=0)"):
        task = tiny_task(text, data)
        phases = base_phases(task, context_of(task, 0, Client("a", data["a"])))
        assert [(p.train, p.norm) for p in phases] == [("head", "running"), ("body", "running")]


def test_each_phase_moves_only_its_tensors():
    one = play("fedrep(head_epochs=1)", tiny_data(8), n=1, lr=0.1)
    frozen = play("fedrep(head_epochs=1)", tiny_data(8), n=1, lr=0.0)
    assert torch.equal(frozen.states["a"].local["head.weight"], tiny_net().head.weight)
    assert torch.equal(frozen.uploads["a"].model["conv.weight"], tiny_net().conv.weight)
    assert not torch.equal(one.states["a"].local["head.weight"], tiny_net().head.weight)


def test_an_absent_client_keeps_its_head():
    run = play("fedrep(head_epochs=1)", n=2, cohorts=["ab", "b"])
    alone = play("fedrep(head_epochs=1)", n=1, cohorts=["ab"])
    assert torch.equal(run.states["a"].local["head.weight"], alone.states["a"].local["head.weight"])
