"""What the server does with each client's upload: the laws of `receive`, `weigh`, `remember` and `aggregate`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.method import Method
from fednorms.core.part import Part, part
from fednorms.core.round import broadcast, server_update
from fednorms.core.tree import Tree, mean
from fednorms.explain.leaves import what_leaves
from fednorms.methods.registry import method
from tests.support.tiny import close, play, rounds, same, tiny_data, tiny_task

SIZES = (8, 6, 7, 5)


@pytest.fixture(autouse=True)
def tidy(parts_as_before):
    pass


def own(name="own", **hooks):
    return part(name)(type(name.title(), (Part,), hooks))()


def weighing(numbers, name="own", **declared):
    return own(name, weigh=lambda self, r: (numbers, r.mine), **declared)


def scaling(by, name="own"):
    return own(name, receive=lambda self, r: ([u * by for u in r.updates], r.mine))


def started(p, *, n=0, **settings):
    """A task with four clients, and the uploads of a round."""
    chosen = p if isinstance(p, Method) else Method((p,))
    data = tiny_data(*SIZES)
    task = tiny_task(chosen, data, **settings)
    before = rounds(task, data, n)
    after = rounds(task, data, 1, run=before)
    return task, before.server, list(after.uploads.values()), after.server


# -- parts that do nothing --------------------------------------------------------------------------------------------
IDLE = {
    "receive": lambda self, r: (r.updates, r.mine),
    "weigh": lambda self, r: ([1.0] * len(r.clients), r.mine),
    "remember": lambda self, r: r.mine,
    "aggregate": lambda self, r: (mean(list(r.models), list(r.weights)), r.mine),
}


@pytest.mark.parametrize("host", ["fedavg", "scaffold", "feddyn", "fedbn", "fedadam", "fednova", "hbn", "dplocal"])
@pytest.mark.parametrize("hook", IDLE)
def test_a_hook_that_changes_nothing_changes_no_bit(hook, host):
    data = tiny_data(*SIZES)
    plain, idle = play(host, data), play(own(**{hook: IDLE[hook]}) + method(host), data)
    assert same(plain.model, idle.model)
    assert all(same(tree, idle.server.parts[name]) for name, tree in plain.server.parts.items())


# -- the view ---------------------------------------------------------------------------------------------------------
def test_the_view_has_each_client_in_the_order_of_names():
    seen = []
    p = own(
        weigh=lambda self, r: (seen.append(r), [1.0] * 4, r.mine)[1:],
        finish=lambda self, e: (e.mine, Tree(n=e.delta["head.bias"])),
    )
    task, state, uploads, _ = started(p)
    random.Random(0).shuffle(uploads)
    server_update(task, state, uploads)
    r = seen[-1]
    assert r.clients == ("a", "b", "c", "d")
    assert r.samples == r.weights == SIZES
    assert r.total == 4
    for u in uploads:
        i = r.clients.index(u.client)
        assert r.losses[i] == float(u.metrics["loss"])
        assert set(r.model) == {k for k, t in u.model.items() if t.is_floating_point()}
        assert same(r.updates[i], u.model.pick(r.model) - state.model)
        assert torch.equal(r.ups[i]["n"], u.parts["own"]["n"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: scaling(0.5),
        lambda: weighing([1.0, 0.0, 2.0, 0.5]),
        lambda: own(aggregate=lambda self, r: (r.models[2], r.mine)),
    ],
)
def test_the_order_of_arrival_changes_no_bit(make):
    task, state, uploads, after = started(make())
    assert same(server_update(task, state, uploads[::-1]).model, after.model)


# -- receive ----------------------------------------------------------------------------------------------------------
def test_updates_are_changed_in_order_before_weights_see_them():
    lengths = []

    def weigh(self, r):
        lengths.extend(float(u.sqnorm()) for u in r.updates)
        return [1.0] * 4, r.mine

    add = own("add", receive=lambda self, r: ([u + r.model.map(torch.ones_like) for u in r.updates], r.mine))
    task, state, _, after = started(own("look", weigh=weigh) + scaling(0.0) + add)
    assert lengths == pytest.approx([sum(t.numel() for t in state.model.values() if t.is_floating_point())] * 4)
    sent = task.net.sent_params
    close(after.model.pick(sent), state.model.pick(sent).map(lambda t: t + 1))


def test_only_the_changed_client_loses_its_bits():
    p = own(receive=lambda self, r: ([r.updates[0], r.updates[1] * 2, *r.updates[2:]], r.mine))
    _, state, uploads, after = started(p)
    start = Tree({k: t for k, t in state.model.items() if t.is_floating_point()})
    doubled = Tree({**uploads[1].model, **(start + 2 * (uploads[1].model - start).pick(start))})
    assert (doubled["norm.running_var"] >= 0).all()
    assert same(after.model, mean([uploads[0].model, doubled, uploads[2].model, uploads[3].model], list(SIZES)))


@pytest.mark.parametrize("hook", ["receive", "aggregate"])
def test_a_variance_never_becomes_negative(hook):
    far = {
        "receive": lambda self, r: ([u.map(lambda t: t - 9) for u in r.updates], r.mine),
        "aggregate": lambda self, r: (r.model.map(lambda t: t - 9), r.mine),
    }
    after = started(own(**{hook: far[hook]}))[3]
    assert after.model["norm.running_var"].min() == 0
    assert after.model["norm.running_mean"].min() < 0


# -- weigh ------------------------------------------------------------------------------------------------------------
def test_factors_multiply_the_weights_by_size():
    one, two = weighing([1.0, 2.0, 0.5, 1.0], "one"), weighing(torch.tensor([3.0, 1.0, 1.0, 0.25]), "two")
    _, _, uploads, after = started(one + two)
    expected = mean([u.model for u in uploads], [8 * 3, 6 * 2, 7 * 0.5, 5 * 0.25])
    assert same(after.model, expected)
    assert same(started(two + one)[3].model, expected)


def test_a_part_that_sets_weights_replaces_sizes_and_factors_still_multiply():
    absolute, factors = weighing([1.0, 2.0, 3.0, 4.0], "absolute", sets_weights=True), weighing([1.0, 1.0, 1.0, 0.5])
    _, _, uploads, after = started(absolute + factors)
    assert same(after.model, mean([u.model for u in uploads], [1.0, 2.0, 3.0, 2.0]))


def test_a_client_of_weight_zero_is_left_out_of_everything():
    """Also of uniform, listed and even means: the result is that of a round without it."""
    data = tiny_data(*SIZES)
    for host in ("scaffold", "feddyn", "fedplvm", "fednorm", "hbn", "fedexp"):
        p = own(weigh=lambda self, r: ([float(name != "b") for name in r.clients], r.mine))
        task = tiny_task(p + method(host), data)
        before = rounds(task, data, 1)
        after = rounds(task, data, 1, run=before)
        rest = [u for u in after.uploads.values() if u.client != "b"]
        without = server_update(task, before.server, rest)
        assert same(after.model, without.model)
        assert all(same(tree, without.parts[name]) for name, tree in after.server.parts.items())


def test_state_of_weights_is_kept_as_that_of_server_steps():
    """Weights that depend on earlier rounds, as learned ones do; `server` sees the new state."""
    seen = []
    p = own(
        init=lambda self, w: (Tree(n=torch.zeros(1, dtype=torch.float64)), Tree()),
        weigh=lambda self, r: ([1.0 + float(r.mine["n"]), 1.0, 1.0, 1.0], Tree(n=r.mine["n"] + 1)),
        server=lambda self, d, r: (seen.append(float(r.mine["n"])), (d, r.mine))[1],
    )
    _, _, uploads, after = started(p, n=2)
    assert same(after.model, mean([u.model for u in uploads], [8 * 3.0, 6, 7, 5]))
    assert float(after.parts["own"]["n"]) == 3
    assert seen == [1.0, 2.0, 3.0]


# -- remember ---------------------------------------------------------------------------------------------------------
def test_what_is_remembered_is_of_clients_that_count_as_they_were_changed_and_weighed():
    """Also if the part that keeps it is listed first."""
    seen = []
    look = own("look", remember=lambda self, r: (seen.append(r), Tree(n=r.models[0]["head.bias"]))[1])
    leave = weighing([0.0, 1.0, 2.0, 1.0], "leave")
    _, state, uploads, after = started(look + leave + scaling(0.5, "half"))
    r = seen[-1]
    assert (r.clients, r.weights) == (("b", "c", "d"), (6.0, 14.0, 5.0))
    moved = uploads[1].model["head.bias"] - state.model["head.bias"]
    torch.testing.assert_close(r.updates[0]["head.bias"], 0.5 * moved)
    assert torch.equal(after.parts["look"]["n"], r.models[0]["head.bias"])


@pytest.mark.parametrize("host", ["mixheads", "fedap"])
def test_who_is_left_out_reaches_no_other_client(host):
    """Krum drops a hostile client; the models that others are sent must not hold its weights."""
    data = tiny_data(*SIZES)
    task = tiny_task(f"{host} + krum(byzantine=1, keep=3)", data)
    before = rounds(task, data, 1)
    uploads = list(rounds(task, data, 1, run=before).uploads.values())
    found = []
    for size in (1e3, -2e3):
        far = replace(uploads[2], model=Tree({**uploads[2].model, "head.bias": torch.full((3,), size).double()}))
        found.append(server_update(task, before.server, [*uploads[:2], far, uploads[3]]))
    for client in data:
        one, other = (broadcast(task, state).to(client).model for state in found)
        assert same(one, other)
        assert one["head.bias"].abs().max() < 100
    first, last = (
        {n: t for n, t in state.parts[host].items() if n.startswith(("c/", "models/c/"))}
        for state in (before.server, found[0])
    )
    assert same(first, last)


# -- aggregate --------------------------------------------------------------------------------------------------------
def test_a_rule_replaces_the_mean_of_parameters_and_statistics_and_counters_are_the_first_clients():
    p = own(aggregate=lambda self, r: (r.models[3], r.mine))
    _, _, uploads, after = started(p)
    floating = {k for k, t in after.model.items() if t.is_floating_point()}
    assert same(after.model, {k: uploads[3 if k in floating else 0].model[k] for k in after.model})


def test_server_steps_and_even_means_see_the_result_of_the_rule():
    rule = own("rule", aggregate=lambda self, r: (r.models[1], r.mine))
    seen = []
    look = own("look", uses_even_mean=True, server=lambda self, d, r: (seen.append((d, r.even)), (d, r.mine))[1])
    _, state, uploads, _ = started(rule + look)
    delta = (uploads[1].model - state.model).pick(seen[0][0])
    assert same(seen[0][0], delta)
    assert same(seen[0][1], delta)


# -- what is refused --------------------------------------------------------------------------------------------------
def test_two_rules_or_two_parts_that_set_weights_are_refused():
    one, two = (own(n, aggregate=IDLE["aggregate"]) for n in ("one", "two"))
    with pytest.raises(BadInput, match="one and two each replace the mean of models: keep one of them"):
        one + two
    one, two = (weighing([1.0], n, sets_weights=True) for n in ("one", "two"))
    with pytest.raises(BadInput, match="one and two each set the clients' weights: keep one of them"):
        one + two


@pytest.mark.parametrize("hook", IDLE)
def test_noise_for_the_plain_mean_does_not_go_with_individual_treatment(hook):
    p = own(**{hook: IDLE[hook]})
    with pytest.raises(BadInput, match="own treats clients differently, while dpcentral adds noise for their plain"):
        p + method("dpcentral")
    assert (p + method("dplocal")).individual == ["own"]  # noised before it leaves: nothing is revealed by looking


WRONG = {
    "receive-none": ("receive", lambda r: None, "receive must return an update for each client.*got NoneType"),
    "receive-few": ("receive", lambda r: (r.updates[:1], r.mine), "got 1 updates of 4 clients"),
    "receive-state": ("receive", lambda r: (r.updates, None), "got NoneType"),
    "receive-shape": ("receive", lambda r: ([u.map(torch.sum) for u in r.updates], r.mine), r"a tensor of \(\)"),
    "weigh-one": (
        "weigh",
        lambda r: ([1.0], r.mine),
        "weigh must return one number >= 0 .*got 1 numbers for 4 clients",
    ),
    "weigh-words": ("weigh", lambda r: (["a"] * 4, r.mine), "weigh must return one number"),
    "weigh-negative": ("weigh", lambda r: ([1.0, -0.5, 1, 1], r.mine), "got -0.5. Return 0 to leave a client out"),
    "weigh-nothing": ("weigh", lambda r: 1.0, "got float"),
    "remember-two": ("remember", lambda r: (r.mine, r.mine), "remember must return the new state"),
    "aggregate-some": ("aggregate", lambda r: (r.models[0].pick(["conv.bias"]), r.mine), "a Tree without conv.weight"),
    "aggregate-more": ("aggregate", lambda r: (Tree({**r.models[0], "x": torch.ones(1)}), r.mine), 'an entry "x"'),
    "aggregate-one": ("aggregate", lambda r: r.models[0], "two Trees"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_return_value_names_part_and_hook(case):
    hook, value, words = WRONG[case]
    with pytest.raises(BadInput, match=rf"^own: .*{words}"):
        started(own(**{hook: lambda self, r: value(r)}))


SPOILED = {
    "receive": lambda self, r: ([u * float("nan") for u in r.updates], r.mine),
    "weigh": lambda self, r: ([float("inf")] * 4, r.mine),
    "aggregate": lambda self, r: (r.models[0].map(lambda t: t / 0), r.mine),
}


@pytest.mark.parametrize("hook", SPOILED)
def test_what_is_not_finite_names_part_and_round(hook):
    with pytest.raises(Diverged, match=rf"round 1 .*own \({hook}\)"):
        started(own(**{hook: SPOILED[hook]}))


def test_leaving_out_all_clients_is_an_error():
    with pytest.raises(Diverged, match="No client has a weight above 0 in round 1: one and two left all 4 of them out"):
        started(weighing([1.0, 0, 0, 0], "one") + weighing([0, 1.0, 1, 1], "two"))


# -- what users are told ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hook", "acts"),
    [("receive", ()), ("weigh", ("client weights",)), ("remember", ()), ("aggregate", ("aggregation",))],
)
def test_describe_and_privacy_say_that_the_server_sees_each_update(hook, acts):
    p = own(**{hook: IDLE[hook]})
    described, privacy = fn.describe(p), what_leaves(p)
    assert described.acts_on == acts
    assert not described.averaged_only
    assert "secure aggregation impossible" in repr(described)
    assert not privacy.secure_aggregation
    assert "The server must see each site's update: own." in repr(privacy)
    assert "The server must see" not in repr(what_leaves("fedavg"))


def test_describe_names_the_part_that_sets_the_weights():
    described = fn.describe(weighing([1.0, 2.0], sets_weights=True))
    assert described.weighting == "own"
    assert "models weighted by own" in repr(described)
    assert fn.describe(weighing([1.0, 2.0])).weighting == "size"


def test_describe_says_whether_updates_are_changed():
    assert fn.describe(scaling(0.5)).acts_on == ("received updates",)
