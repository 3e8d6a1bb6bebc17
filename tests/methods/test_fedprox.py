"""FedProx: a pull towards the broadcast model."""

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.methods.registry import method
from tests.reference.fedprox import fedprox
from tests.support.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_equals_a_plain_torch_loop():
    data = tiny_data()
    task = tiny_task("fedprox(mu=0.5)", data, epochs=2)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(2)]
    close(rounds(task, data, 2).model, fedprox(tiny_net(), pairs(data), plans, 0.1, 0.5).state_dict())


def test_the_first_step_is_fedavgs_because_the_pull_is_zero_there():
    plain, pulled = (play(text, n=1, steps=1) for text in ("fedavg", "fedprox(mu=1.0)"))
    close(plain.model, pulled.model, atol=1e-14)


def test_mu_zero_is_fedavg_bit_for_bit():
    assert same(play("fedavg").model, play("fedprox(mu=0)").model)


@pytest.mark.parametrize("mu", [0.25, 1.0, 3.0])
def test_fixed_point_of_a_quadratic(mu):
    a, w = 3.0, 1.0

    def quadratic(z, y):
        return 0.5 * (z - a).square().mean()

    run = play(f"fedprox(mu={mu})", ones(1), n=1, model=Scalar(w), loss=quadratic, steps=200, lr=0.2, batch_size=1)
    assert float(run.model["head.weight"]) == pytest.approx((a + mu * w) / (1 + mu), abs=1e-12)


def test_the_penaltys_gradient_is_mu_times_the_way_walked():
    def linear(z, y):
        return z.mean()

    # One step moves w by -lr; the second sees the gradient 1 + mu (w - w_0) = 1 - mu lr.
    run = play("fedprox(mu=0.5)", ones(2), n=1, model=Scalar(1.0), loss=linear, steps=2, lr=0.1, batch_size=2)
    assert float(run.model["head.weight"]) == pytest.approx(1.0 - 0.1 - 0.1 * (1 - 0.5 * 0.1), abs=1e-15)


def test_statistics_are_not_pulled():
    # At rate 0 only statistics move, by the forward passes.
    assert same(play("fedavg", lr=0.0).model, play("fedprox(mu=1.0)", lr=0.0).model)


def test_the_head_that_babu_froze_adds_nothing():
    run = play("fedprox(mu=1.0) + fedbabu", n=1)
    assert torch.equal(run.model["head.weight"], tiny_net().head.weight.detach())


# -- stragglers -----------------------------------------------------------------------------------------------------
def work(text, t_max=30, **settings):
    """Epochs' worth of steps of every client in every round: sizes are multiples of the batch."""
    data = tiny_data(4, 4, 4)
    task = tiny_task(text, data, lr=0.0, **settings)
    run, seen = None, []
    for _ in range(t_max):
        run = rounds(task, data, 1, run=run)
        seen.append(tuple(u.metrics["steps"] for u in run.uploads.values()))
    return seen


def test_a_straggler_does_between_one_and_all_epochs():
    all_late = [n for row in work("fedprox(straggler_fraction=1)", epochs=4) for n in row]
    assert set(all_late) == {1, 2, 3, 4}
    some = [n for row in work("fedprox(straggler_fraction=0.5)", epochs=4) for n in row]
    assert 0.2 < sum(n < 4 for n in some) / len(some) < 0.6  # half of 3/4
    assert {n for row in work("fedprox", epochs=4, t_max=5) for n in row} == {4}


def test_with_one_epoch_or_a_number_of_steps_fewer_steps_are_done():
    assert {n for row in work("fedprox(straggler_fraction=1)", batch_size=1, t_max=20) for n in row} == {1, 2, 3, 4}
    assert {n for row in work("fedprox(straggler_fraction=1)", steps=2, t_max=10) for n in row} == {1, 2}


def test_stragglers_depend_on_the_seed_and_not_on_the_method():
    one = work("fedprox(mu=0.1, straggler_fraction=0.5)", epochs=3, t_max=8)
    assert one == work("scaffold + fedprox(mu=0, straggler_fraction=0.5) + fedfn", epochs=3, t_max=8)
    assert one != work("fedprox(mu=0.1, straggler_fraction=0.5)", epochs=3, t_max=8, seed=1)
    fewer = work("fedprox(mu=0.1, straggler_fraction=0.2)", epochs=3, t_max=8)
    assert all(a <= b for x, y in zip(one, fewer, strict=True) for a, b in zip(x, y, strict=True))  # a subset


@pytest.mark.parametrize("options", ["mu=-0.1", "straggler_fraction=1.5"])
def test_illegal_options_are_refused(options):
    with pytest.raises(BadInput, match=r"fedprox: .* must be a number"):
        method(f"fedprox({options})")
