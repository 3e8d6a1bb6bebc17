"""APFL and pFedMe: personal models that are trained in the steps of the client's own.

Three rounds of three clients without running statistics, in float64, next to public programs that got the same batches:
the largest difference of a weight of the server is 1.1e-16 for APFL (github.com/lgcollins/FedRep with alpha=0.5,
its momentum and weight decay set to 0) and 1.1e-16 for pFedMe (the authors', github.com/CharlieDinh/pFedMe).
"""

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.round import broadcast, local_update
from fednorms.core.states import Client
from fednorms.core.tree import branch
from fednorms.evaluation.modes import Mode, headline, model_for
from tests.reference.personal import apfl, pfedme
from tests.support.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def vector(tree):
    return torch.cat([tree[n].reshape(-1) for n, _ in tiny_net().named_parameters()])


def played(text, n=3, **settings):
    data = tiny_data()
    task = tiny_task(text, data, **settings)
    return data, task, rounds(task, data, n), [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(n)]


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_equals_a_plain_loop(adaptive):
    data, _, run, plans = played(f"apfl(alpha=0.3, adaptive={str(adaptive).lower()})", epochs=2)
    server, v, alphas = apfl(tiny_net(), pairs(data), plans, 0.1, 0.3, adaptive)
    close(run.model, server.state_dict())
    for k, name in enumerate("abc"):
        mine = run.states[name].parts["apfl"]
        torch.testing.assert_close(vector(branch(mine, "v")), v[k], atol=1e-10, rtol=0)
        assert float(mine["alpha"]) == pytest.approx(alphas[k], abs=1e-10)
    assert adaptive == (len(set(alphas)) > 1)


@pytest.mark.parametrize("settings", [{}, {"beta": 2.0, "mu": 0.01}], ids=str)
def test_pfedme_equals_a_plain_loop(settings):
    options = {"lam": 2.0, "inner": 3, "rate": 0.05, "beta": 1.0, "mu": 0.0, **settings}
    data, _, run, plans = played("pfedme(" + ", ".join(f"{k}={v}" for k, v in options.items()) + ")", epochs=2)
    server, thetas = pfedme(tiny_net(), pairs(data), plans, 0.1, **options)
    close(run.model, server.state_dict())
    for k, name in enumerate("abc"):
        torch.testing.assert_close(vector(run.states[name].parts["pfedme"]), thetas[k], atol=1e-10, rtol=0)


@pytest.mark.parametrize("rest", ["", " + scaffold", " + fedbn", " + fedprox(mu=0.1)"])
def test_apfl_leaves_the_global_model_as_it_is(rest):
    plain, both = (
        play((rest or "fedavg").removeprefix(" + "), n=3, momentum=0.9),
        play("apfl" + rest, n=3, momentum=0.9),
    )
    assert same(plain.model, both.model)


def test_apfl_with_alpha_one_is_every_client_on_its_own():
    data = {k: s for k, s in tiny_data().items() if k == "a"}
    run, alone = play("apfl(alpha=1)", data, n=3), play("standalone", data, n=3)
    found = branch(run.states["a"].parts["apfl"], "v")
    close(found, alone.states["a"].local.pick(found))


def test_apfl_with_alpha_zero_never_moves_v():
    run = play("apfl(alpha=0)", n=3)
    close(branch(run.states["a"].parts["apfl"], "v"), dict(tiny_net().named_parameters()))


@pytest.mark.parametrize(("a", "c", "lam"), [(2.0, 3.0, 0.5), (1.0, -1.0, 2.0)])
def test_theta_tends_to_the_proximal_point(a, c, lam):
    # F(theta) = a (theta - c)^2 / 2: theta* = (a c + lam w) / (a + lam), and w moves along the envelope's gradient.
    w, data = 0.5, ones(4)
    text = f"pfedme(lam={lam}, inner=200, rate=0.2)"
    task = tiny_task(text, data, model=Scalar(w), loss=lambda z, y: (a * (z - c) ** 2 / 2).mean(), steps=1, lr=0.1)
    run = rounds(task, data, 1)
    theta = (a * c + lam * w) / (a + lam)
    assert float(run.states["a"].parts["pfedme"]["head.weight"]) == pytest.approx(theta, abs=1e-9)
    assert float(run.model["head.weight"]) == pytest.approx(w - 0.1 * lam * (w - theta), abs=1e-9)


@pytest.mark.parametrize("text", ["apfl(alpha=0.3)", "pfedme(rate=0.1)"])
def test_a_client_is_tested_with_its_own_model(text):
    data, task, _, _ = played(text, n=1)
    run = rounds(task, data, 2, cohorts=["ab", "ab"])
    mine = next(iter(run.states["a"].parts.values()))
    assert headline(task).model == "personal"
    sent = broadcast(task, run.server)
    tested, _ = model_for(task, sent, Client("a", data["a"], run.states["a"]), headline(task))
    for name, _ in tiny_net().named_parameters():
        own = 0.3 * mine[f"v/{name}"] + 0.7 * run.model[name] if "apfl" in text else mine[name]
        torch.testing.assert_close(tested[name], own, atol=1e-14, rtol=0)
        assert not torch.equal(own, run.model[name])
    everybodys, _ = model_for(task, sent, Client("a", data["a"], run.states["a"]), Mode("global", "global"))
    assert same(everybodys, run.model)
    never, _ = model_for(task, sent, Client("c", data["c"], None), headline(task))
    close(never, run.model)


@pytest.mark.parametrize("text", ["apfl", "pfedme"])
def test_a_kept_state_stays_as_it_was(text):
    data, task, run, _ = played(text, n=1)
    before = run.states["a"].parts[text].clone()
    model = run.model.clone()
    local_update(task, broadcast(task, run.server), Client("a", data["a"], run.states["a"]))
    assert same(run.states["a"].parts[text], before)
    assert same(run.model, model)


@pytest.mark.parametrize("pair", ["apfl + pfedme", "ditto + apfl", "pfedme + ditto"])
def test_two_second_models_are_refused_by_name(pair):
    with pytest.raises(BadInput, match=r"apfl and pfedme|ditto and apfl|pfedme and ditto"):
        fn.method(pair)


def test_a_personal_model_that_diverges_stops_the_run():
    with pytest.raises(Diverged, match='Client "a"'):
        play("pfedme(rate=1e200)", n=2)


def test_costs():
    one, other, plain = (fn.describe(text, "cnn-small") for text in ("apfl", "pfedme(inner=4)", "fedavg"))
    assert (one.forward_passes, other.forward_passes) == (2.0, 4.0)
    assert one.bytes_up == other.bytes_up == plain.bytes_up
    assert one.acts_on == ("gradient", "test")


@pytest.mark.parametrize("other", ["fedsam(rho=0.2)", "fedsmoo(rho=0.2)"])
def test_apfl_moves_once_a_step_and_changes_nothing_of_others_that_ask_for_more_gradients(other):
    plain = play(other, n=2)
    for text in (f"{other} + apfl", f"apfl + {other}"):
        both = play(text, n=2)
        assert same(plain.model, both.model)
        if "fedsmoo" in other:
            assert same(plain.states["a"].parts["fedsmoo"], both.states["a"].parts["fedsmoo"])
