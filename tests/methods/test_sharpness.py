"""FedSAM, FedASAM and FedLESAM: gradients at perturbed weights."""

from functools import partial

import pytest

import fednorms as fn
from tests.reference.sharpness import asam, fedlesam, fedsam, sam
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

TAKE = {
    "fedsam(rho=0.2)": partial(sam, rho=0.2),
    "fedsam(rho=0.5, kind=asam, eta=0.1)": partial(asam, rho=0.5, eta=0.1),
}


@pytest.mark.parametrize("text", TAKE)
def test_equals_a_plain_torch_loop(text):
    data = tiny_data()
    task = tiny_task(text, data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(2)]
    wanted = fedsam(tiny_net(), pairs(data), plans, 0.1, TAKE[text]).state_dict()
    close(rounds(task, data, 2).model, wanted)


def test_lesam_equals_a_plain_torch_loop():
    data, cohorts = tiny_data(), [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    task = tiny_task("fedlesam(rho=0.3)", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    numbers = [["abc".index(k) for k in cohort] for cohort in cohorts]
    wanted = fedlesam(tiny_net(), pairs(data), plans, numbers, 0.1, 0.3).state_dict()
    close(rounds(task, data, 3, cohorts=cohorts).model, wanted)


@pytest.mark.parametrize("text", ["fedsam(rho=0)", "fedsam(rho=0, kind=asam)", "fedlesam(rho=0)"])
def test_rho_zero_is_fedavg_bit_for_bit(text):
    assert same(play("fedavg").model, play(text).model)


def test_the_first_round_of_lesam_is_fedavgs():
    assert same(play("fedavg", n=1).model, play("fedlesam(rho=1)", n=1).model)


def test_the_reported_loss_is_that_at_the_weights():
    """Of one step: the loss before any perturbation, counted once."""
    losses = [float(play(text, n=1, steps=1).uploads["a"].metrics["loss"]) for text in ("fedavg", "fedsam(rho=1)")]
    assert losses[0] == losses[1]


def test_costs():
    assert [fn.describe(text).forward_passes for text in ("fedsam", "fedlesam")] == [2.0, 1.0]
    assert fn.describe("fedsam").stateless_clients
    assert not fn.describe("fedlesam").stateless_clients
