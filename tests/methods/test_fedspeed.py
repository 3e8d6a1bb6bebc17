"""FedSpeed and FedSMOO: sharpness-aware steps with a corrected proximal term.

Next to the authors' program (github.com/woodenchild95/FL-Simulator), with the same batches in float64 for three rounds
of three clients and a network without statistics, the largest difference of a weight is 1.9e-16 for both.
"""

import pytest
import torch

import fednorms as fn
from fednorms.core.tree import branch
from tests.reference.fedspeed import fedspeed
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

COHORTS = ["abc", "ac", "b", "ab"]
NUMBERS = [["abc".index(k) for k in cohort] for cohort in COHORTS]


def vector(tree):
    return torch.cat([tree[n].reshape(-1) for n, _ in tiny_net().named_parameters()])


@pytest.mark.parametrize("settings", [{}, {"clip": 0.5}], ids=str)
@pytest.mark.parametrize("text", ["fedspeed(lam=0.2, rho=0.3)", "fedspeed(lam=0.2, rho=0.3, alpha=0.7)", "fedsmoo"])
def test_equals_a_plain_loop_under_partial_participation(text, settings):
    data = tiny_data(13, 4, 7)
    smoo = text == "fedsmoo"
    task = tiny_task("fedsmoo(lam=0.2, rho=0.3)" if smoo else text, data, epochs=2, **settings)
    run = rounds(task, data, 4, cohorts=COHORTS)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(4)]
    alpha = 0.7 if "alpha" in text else 1.0
    model, h, mu, s = fedspeed(
        tiny_net(), pairs(data), plans, NUMBERS, 0.1, 0.2, 0.3, alpha=alpha, smoo=smoo, **settings
    )
    close(run.model, model.state_dict(), atol=1e-9)
    for k, name in enumerate("abc"):
        mine = next(iter(run.states[name].parts.values()))
        torch.testing.assert_close(vector(branch(mine, "h") if smoo else mine), h[k], atol=1e-9, rtol=0)
        if smoo:
            torch.testing.assert_close(vector(branch(mine, "mu")), mu[k], atol=1e-9, rtol=0)
    if smoo:
        torch.testing.assert_close(vector(branch(run.server.parts["fedsmoo"], "s")), s, atol=1e-9, rtol=0)


@pytest.mark.parametrize("other", ["fedspeed(lam=0.3, alpha=0)", "fedsmoo(lam=0.3, rho=0)"])
def test_without_a_second_gradient_it_is_fedspeed_without_ascent(other):
    assert same(play("fedspeed(lam=0.3, rho=0)", cohorts=COHORTS, n=4).model, play(other, cohorts=COHORTS, n=4).model)


def test_without_ascent_it_is_feddyn_for_clients_of_equal_size():
    data = tiny_data(8, 8, 8)
    one, other = (
        play(t, data, n=4, cohorts=COHORTS) for t in ("fedspeed(lam=0.3, rho=0)", "feddyn(alpha=0.3, form=code)")
    )
    close(one.model, other.model)


def test_the_first_ascent_of_smoo_is_fedspeeds():
    one, other = (play(f"{name}(rho=0.3)", n=1, steps=1) for name in ("fedspeed", "fedsmoo"))
    assert same(one.model, other.model)


def test_a_clients_kept_state_is_not_changed_by_a_later_round():
    data = tiny_data()
    task = tiny_task("fedsmoo", data)
    run = rounds(task, data, 1)
    kept = run.states["a"].parts["fedsmoo"]
    before = kept.clone()
    rounds(task, data, 1, run=run)
    assert same(kept, before)


@pytest.mark.parametrize("text", ["fedspeed(lam=5.0)", "fedsmoo(lam=5.0)"])
def test_tensors_of_a_client_are_not_regularized(text):
    run = play(f"{text} + fedbn", n=2)
    names = {n.split("/")[-1] for n in run.states["a"].parts[text.split("(")[0]]}
    assert names == {"conv.weight", "conv.bias", "head.weight", "head.bias"}


def test_costs():
    speed, smoo, plain = (fn.describe(text, "cnn-small") for text in ("fedspeed", "fedsmoo", "fedavg"))
    assert (speed.forward_passes, smoo.forward_passes) == (2.0, 2.0)
    assert speed.bytes_up == plain.bytes_up
    assert smoo.bytes_up > 1.9 * plain.bytes_up
    assert smoo.bytes_down > 1.9 * plain.bytes_down
