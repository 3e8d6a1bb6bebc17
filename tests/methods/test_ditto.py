"""Ditto: a personal model next to the global one."""

import pytest
import torch

from fednorms.core.errors import Diverged
from fednorms.core.round import broadcast, initial_state, local_update, twin_model
from fednorms.core.states import Client
from fednorms.evaluation.modes import Mode, headline, model_for
from tests.reference.ditto import ditto
from tests.support.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def personal(task, run, name):
    return twin_model(task, run.states[name].parts)


def test_equals_a_plain_torch_loop_over_three_rounds():
    data = tiny_data()
    task = tiny_task("ditto(lam=0.75)", data, epochs=2)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    server, models = ditto(tiny_net(), pairs(data), plans, 0.1, 0.75)
    close(run.model, server.state_dict())
    for name, model in zip("abc", models, strict=True):
        close(dict(sorted(personal(task, run, name).items())), dict(sorted(model.state_dict().items())))


@pytest.mark.parametrize(("a", "c", "lam"), [(2.0, 3.0, 0.5), (1.0, -1.0, 2.0)])
def test_the_fixed_point_under_a_fixed_global_model(a, c, lam):
    # F(v) = a (v - c)^2 / 2: v* = (a c + lam w) / (a + lam).
    w = 0.5
    data = ones(4)
    task = tiny_task(f"ditto(lam={lam})", data, model=Scalar(w), loss=lambda z, y: (a * (z - c) ** 2 / 2).mean())
    sent = broadcast(task, initial_state(task))
    state = None
    for _ in range(200):
        _, state = local_update(task, sent, Client("a", data["a"], state))
    v = twin_model(task, state.parts)["head.weight"].squeeze()
    torch.testing.assert_close(v, torch.tensor((a * c + lam * w) / (a + lam)).double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "keep_momentum": True}]
)
def test_lam_zero_is_standalone_even_with_absences(settings):
    data, cohorts = tiny_data(), ["ab", "bc", "abc"]
    task = tiny_task("ditto(lam=0)", data, **settings)
    run = rounds(task, data, 3, cohorts=cohorts)
    alone = play("standalone", data, n=3, cohorts=cohorts, **settings)
    for name in data:
        assert same(dict(sorted(personal(task, run, name).items())), dict(sorted(alone.states[name].local.items())))


def test_lam_zero_is_standalone_even_where_a_part_owns_trained_tensors():
    data = tiny_data()
    task = tiny_task("ditto(lam=0) + fednorm", data)
    run, alone = rounds(task, data, 3), play("standalone", data, n=3)
    for name in data:
        assert same(dict(sorted(personal(task, run, name).items())), dict(sorted(alone.states[name].local.items())))


@pytest.mark.parametrize("rest", ["", " + scaffold", " + fedbn", " + fedprox(mu=0.1)", " + fedrdn"])
def test_the_global_part_is_untouched_bit_for_bit(rest):
    plain = play((rest or "fedavg").removeprefix(" + "), n=3, momentum=0.9)
    both = play("ditto" + rest, n=3, momentum=0.9)
    assert same(plain.model, both.model)
    for name in plain.states:
        assert same(plain.states[name].local, both.states[name].local)


def test_other_parts_corrections_do_not_reach_the_personal_model():
    data = tiny_data()
    tasks = [tiny_task(t, data) for t in ("ditto(lam=0)", "ditto(lam=0) + scaffold + fedprox(mu=1.0)")]
    one, other = (personal(t, rounds(t, data, 3), "a") for t in tasks)
    assert same(one, other)


def test_nothing_more_is_sent():
    run, plain = play("ditto"), play("fedavg")
    assert set(run.uploads["a"].model) == set(plain.uploads["a"].model)
    assert not run.uploads["a"].parts.get("ditto")


def test_a_client_is_tested_with_its_personal_model():
    data = tiny_data()
    task = tiny_task("ditto", data)
    run = rounds(task, data, 2, cohorts=["ab", "ab"])
    assert headline(task) == Mode("personal", "own")
    sent = broadcast(task, run.server)
    tested, _ = model_for(task, sent, Client("a", data["a"], run.states["a"]), headline(task))
    assert all(torch.equal(tested[n], t) for n, t in personal(task, run, "a").items())
    everybodys, _ = model_for(task, sent, Client("a", data["a"], run.states["a"]), Mode("global", "global"))
    assert same(everybodys, run.model)
    never, _ = model_for(task, sent, Client("c", data["c"], None), headline(task))
    assert same(never, run.model)


def test_the_pull_is_on_trained_tensors_only():
    # A huge pull holds the weights at the received model; running statistics move all the same.
    data = tiny_data(8)
    task = tiny_task("ditto(lam=10.0)", data, lr=0.1, steps=1)
    v = personal(task, rounds(task, data, 1), "a")
    assert not torch.equal(v["norm.running_mean"], tiny_net().norm.running_mean)


def test_a_personal_model_that_diverges_is_named():
    with pytest.raises(Diverged, match=r"ditto|the model"):
        play("ditto(lam=1e200)", n=4)
