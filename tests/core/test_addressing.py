"""The down-link per client: the laws of `down_to` and `model_to`, a slow reference, and every engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.part import Part, part
from fednorms.core.round import broadcast, initial_state
from fednorms.core.states import Client
from fednorms.core.tree import Tree
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import Mode, headline, model_for
from fednorms.explain.leaves import what_leaves
from fednorms.methods.registry import method
from tests.engines.test_graphs_on_host import assert_same, setting
from tests.engines.test_graphs_on_host import play as play_engine
from tests.reference.addressed import halfway as reference
from tests.support.addressed import halfway
from tests.support.tiny import client_model, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

COHORTS = [["a", "b"], ["b", "c"], ["a", "b", "c"]]


@pytest.fixture(autouse=True)
def tidy(parts_as_before):
    pass


@pytest.fixture
def halves():
    with halfway() as made:
        yield made


def own(name="own", **hooks):
    return part(name)(type(name.title(), (Part,), hooks))()


IDLE = {"down_to": lambda self, mine, client: Tree(), "model_to": lambda self, model, mine, client: model}


# -- laws -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["fedavg", "scaffold", "fedbn", "fedadam", "fedwsq(first=true)", "hbn", "dplocal"])
@pytest.mark.parametrize("hook", IDLE)
def test_a_hook_that_changes_nothing_changes_no_bit(hook, host):
    plain, idle = play(host), play(own(**{hook: IDLE[hook]}) + method(host))
    assert same(plain.model, idle.model)
    assert all(same(tree, idle.server.parts[name]) for name, tree in plain.server.parts.items())


def test_without_such_a_part_all_clients_get_the_very_same_object():
    task = tiny_task("scaffold + fedbn", tiny_data())
    sent = broadcast(task, initial_state(task))
    assert sent.to("a") is sent
    assert sent.to_all is sent


def test_it_is_the_reference(halves):
    data = tiny_data()
    task = tiny_task(halves, data)
    run = rounds(task, data, 3, cohorts=COHORTS)
    plans = [dict(zip(data, (plan_of(task, split, k, t) for k, split in data.items()), strict=True)) for t in range(3)]
    clients = dict(zip(data, pairs(data), strict=True))
    server, last = reference(tiny_net(), clients, plans, 3, 0.1, COHORTS)
    floating = [n for n, t in run.model.items() if t.is_floating_point()]
    close(run.model.pick(floating), {n: server[n] for n in floating})
    wanted = {n: (server[n] + last["c"][n]) / 2 for n in floating}
    close(client_model(task, data, run, "c").pick(floating), wanted)


def test_a_client_that_the_server_does_not_know_gets_what_all_get(halves):
    data = tiny_data()
    task = tiny_task(halves, data)
    sent = broadcast(task, rounds(task, data, 1, cohorts=[["a"]]).server)
    assert same(sent.to("stranger").model, sent.model)
    assert not sent.to("stranger").parts["test_halfway"]
    assert list(sent.to("a").parts["test_halfway"]) == ["head.bias"]
    assert not sent.to_all.parts["test_halfway"]


def test_a_tree_for_one_client_comes_on_top_of_what_all_get():
    p = own(
        down=lambda self, mine: Tree(x=torch.zeros(1), y=torch.zeros(1)),
        down_to=lambda self, mine, client: Tree(x=torch.ones(1)) if client == "a" else Tree(),
    )
    task = tiny_task(p, tiny_data())
    sent = broadcast(task, initial_state(task))
    assert {k: float(v) for k, v in sent.to("a").parts["own"].items()} == {"x": 1.0, "y": 0.0}
    assert {k: float(v) for k, v in sent.to("b").parts["own"].items()} == {"x": 0.0, "y": 0.0}
    assert sent.to("a").model is sent.model


def test_the_update_of_a_client_starts_where_it_started(halves):
    """`finish` compares with the model that the client got: with a rate of 0, nothing has moved."""
    moved = []
    look = own(finish=lambda self, e: (moved.append(float(e.delta.sqnorm())), (e.mine, Tree()))[1])
    data = tiny_data()
    before = rounds(tiny_task(halves, data), data, 1)
    still = tiny_task(halves + look, data, lr=0.0)
    parts = {**before.server.parts, "own": Tree()}
    rounds(still, data, 1, run=replace(before, server=replace(before.server, parts=parts)))
    assert moved == [0.0, 0.0, 0.0]


# -- what is refused --------------------------------------------------------------------------------------------------
def test_two_parts_that_send_models_are_refused():
    one, two = (own(n, model_to=IDLE["model_to"]) for n in ("one", "two"))
    with pytest.raises(BadInput, match="one and two each send each client another model: keep one of them"):
        one + two
    assert (own("three", down_to=IDLE["down_to"]) + one).addressing


@pytest.mark.parametrize("host", ["feddyn", "feddc", "dpcentral", "fednova", "fedcm", "fedexp"])
def test_parts_that_need_one_starting_point_are_refused(host):
    with pytest.raises(BadInput, match=f"{host} needs all clients to start from one model, but own sends each its own"):
        own(model_to=IDLE["model_to"]) + method(host)


WRONG = {
    "none": ("down_to", lambda: None, "down_to must return a Tree, what only this client is sent, got NoneType"),
    "more": ("model_to", lambda: Tree(x=torch.ones(1)), 'model_to must return tensors of the model.*an entry "x"'),
    "shape": ("model_to", lambda: Tree({"head.bias": torch.ones(1)}), r"a tensor of \(1,\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_return_value_names_part_and_hook(case):
    hook, value, words = WRONG[case]
    with pytest.raises(BadInput, match=rf"^own: .*{words}"):
        play(own(**{hook: lambda self, *a: value()}))


def test_a_private_tensor_cannot_be_sent():
    p = own(model_to=lambda self, model, mine, client: Tree({"norm.weight": torch.ones(4).double()}))
    with pytest.raises(BadInput, match=r'an entry "norm\.weight", which it may not change here'):
        play(p + method("fedbn"))


# -- engines ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("beside", ["fedavg", "scaffold", "fedbn", "hbn", "ditto"])
def test_graphs_give_the_loops_results(halves, beside):
    chosen = halves + method(beside)
    task, fast = setting(Graphs, chosen, streams=2)
    _, loop = setting(Loop, chosen)
    assert_same(task, play_engine(task, loop), play_engine(task, fast), loop, fast)


# -- tests ------------------------------------------------------------------------------------------------------------
def test_personal_is_the_clients_model_and_global_the_servers(halves):
    data = tiny_data()
    task = tiny_task(halves, data)
    run = rounds(task, data, 2)
    sent, client = broadcast(task, run.server), Client("a", data["a"], run.states["a"])
    assert headline(task).model == "personal"
    for mode, wanted in (
        ("personal", client_model(task, data, run, "a")),
        ("global", run.model),
        ("unseen", run.model),
    ):
        asked = Mode(mode, "global")
        assert same(model_for(task, asked.received(sent, "a"), client, asked)[0], wanted)


# -- what users are told ----------------------------------------------------------------------------------------------
def test_describe_and_privacy_say_that_messages_differ(halves):
    described, privacy = fn.describe(halves), what_leaves(halves)
    assert described.addressed == ("test_halfway",)
    assert "no (the server must know which client it answers: test_halfway)" in repr(described)
    assert described.to_dict()["addressed"] == ["test_halfway"]
    assert "The server must know which site it answers: test_halfway." in repr(privacy)
    assert privacy.to_dict()["addressed"] == ["test_halfway"]
    assert "all clients receive the same    yes" in repr(fn.describe("scaffold"))


def test_bytes_down_count_what_only_a_client_gets():
    row = Tree(x=torch.zeros(100))
    p = own(down_to=lambda self, mine, client: row)
    assert fn.describe(p).bytes_down == fn.describe("fedavg").bytes_down + row.nbytes()
