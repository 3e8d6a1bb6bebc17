"""FedDC: drifts and control variates."""

from dataclasses import replace

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.tree import Tree, branch
from tests.reference.feddc import feddc
from tests.support.tiny import close, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task

COHORTS = ["abc", "ac", "b", "ab"]
NUMBERS = [["abc".index(k) for k in cohort] for cohort in COHORTS]


def vector(tree):
    return torch.cat([tree[n].reshape(-1) for n, _ in tiny_net().named_parameters()])


def mine(run, name, what):
    return branch(run.states[name].parts["feddc"], what)


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_equals_a_plain_torch_loop_with_unequal_clients_and_a_decaying_rate(variant):
    data = tiny_data(13, 4, 7)
    task = tiny_task(f"feddc(alpha=0.2, variant={variant})", data, epochs=2, schedule="exp", decay=0.5)
    run = rounds(task, data, 4, cohorts=COHORTS)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(4)]
    fixed = 2 * 2 if variant == "author" else None  # two epochs of ceil(8 / 4) batches
    model, c, drifts, variates = feddc(tiny_net(), pairs(data), plans, NUMBERS, 0.1, 0.5, 0.2, fixed)
    close(run.model, model.state_dict(), atol=1e-9)
    torch.testing.assert_close(vector(branch(run.server.parts["feddc"], "c")), c, atol=1e-9, rtol=0)
    for name, h, c_i in zip("abc", drifts, variates, strict=True):
        torch.testing.assert_close(vector(mine(run, name, "h")), h, atol=1e-9, rtol=0)
        torch.testing.assert_close(vector(mine(run, name, "c")), c_i, atol=1e-8, rtol=0)


def test_round_zero_trains_like_fedprox():
    data = tiny_data(8, 8, 8)
    ours = play("feddc(alpha=0.3)", data, n=1, epochs=2)
    prox = play("fedprox(mu=0.3)", data, n=1, epochs=2, weighting="uniform")
    for name in data:
        close(ours.uploads[name].model, prox.uploads[name].model, atol=1e-13)


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_the_first_round_of_all_clients_walks_twice_the_mean_update(variant):
    run = play(f"feddc(variant={variant})", n=1)
    for name, w in tiny_net().named_parameters():
        mean = sum(u.model[name] - w.detach() for u in run.uploads.values()) / 3
        torch.testing.assert_close(run.model[name], w.detach() + 2 * mean, atol=1e-13, rtol=0)


DIVIDING = ["feddc", "feddc(variant=author)", "fednova", "scaffold(control=difference)"]
DIVIDING += ["scaffold(variant=feddc)", "scaffold(variant=fedntd)"]


@pytest.mark.parametrize("text", DIVIDING)
def test_an_update_that_is_divided_by_its_steps_must_come_from_fresh_sgd(text):
    data = tiny_data()
    with pytest.raises(BadInput, match="keep_momentum = true"):
        tiny_task(text, data, momentum=0.9, keep_momentum=True)
    for name in ("adam", "adamw", "custom:SGD@12"):
        with pytest.raises(BadInput, match=f'optimizer = "{name}"'):
            tiny_task(text, data, optimizer=name)
    play(text, n=1, momentum=0.9)


def test_scaffold_by_gradients_accepts_every_optimizer():
    play("scaffold", n=1, momentum=0.9, keep_momentum=True)
    play("scaffold", n=1, optimizer="adamw")
    play("scaffold(option=I)", n=1, optimizer="adamw")


def test_a_drift_is_the_sum_of_the_clients_own_updates_and_the_server_keeps_their_mean():
    data = tiny_data(13, 4, 7)
    task = tiny_task("feddc(alpha=0.1)", data)
    run, sums = None, {k: task.net.initial.pick(task.net.sent_params).zeros() for k in data}
    for cohort in COHORTS:
        before = run.model if run else task.net.initial
        run = rounds(task, data, 1, run=run, cohorts=[cohort])
        for name in cohort:
            sums[name] = sums[name] + (run.uploads[name].model.pick(sums[name]) - before)
    for name, wanted in sums.items():
        close(mine(run, name, "h"), wanted, atol=1e-13)
    mean = (sums["a"] + sums["b"] + sums["c"]) / 3
    close(branch(run.server.parts["feddc"], "H"), mean, atol=1e-13)


@pytest.mark.parametrize("variant", ["author", "paper"])
def test_without_penalty_and_without_drift_it_is_scaffold(variant):
    data = tiny_data(8, 8, 8)
    settings = {"schedule": "exp", "decay": 0.5, "epochs": 2}
    task = tiny_task(f"feddc(alpha=0, variant={variant})", data, **settings)
    run = None
    for cohort in COHORTS:
        run = rounds(task, data, 1, run=run, cohorts=[cohort])
        drift = branch(run.server.parts["feddc"], "H")
        run.server = replace(run.server, model=Tree({**run.model, **(run.model.pick(drift) - drift)}))
    other = "scaffold(variant=feddc)" if variant == "author" else "scaffold(control=difference)"
    wanted = play(other, data, n=4, cohorts=COHORTS, **settings)
    close(run.model, wanted.model, atol=1e-11)
    close(branch(run.server.parts["feddc"], "c"), wanted.server.parts["scaffold"], atol=1e-11)


def test_a_single_client_has_no_gradient_term():
    data = tiny_data(9)
    run = play("feddc(alpha=0.1)", data, n=3)
    close(branch(run.server.parts["feddc"], "c"), mine(run, "a", "c"), atol=1e-12)


def test_c_is_the_mean_of_the_variates_by_relative_size():
    data = tiny_data(13, 4, 7)
    run = play("feddc", data, n=4, cohorts=COHORTS)
    u = {k: len(s) * 3 / 24 for k, s in data.items()}
    for name, c in branch(run.server.parts["feddc"], "c").items():
        mean = sum(u[k] * mine(run, k, "c")[name] for k in data) / 3
        torch.testing.assert_close(c, mean, atol=1e-12, rtol=0)


def test_statistics_are_averaged_only_and_one_model_more_is_sent():
    run = play("feddc", n=2)
    mean = sum(u.model["norm.running_var"] for u in run.uploads.values()) / 3
    torch.testing.assert_close(run.model["norm.running_var"], mean, atol=1e-14, rtol=0)
    assert run.uploads["a"].parts["feddc"].keys() == dict(tiny_net().named_parameters()).keys()


def test_a_rate_of_zero_does_not_change_the_variates():
    run = play("feddc", n=2, lr=0.0)
    assert all(not t.any() for t in run.states["a"].parts["feddc"].values())
