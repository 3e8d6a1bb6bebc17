"""FedProx: a pull towards the broadcast model."""

import pytest
import torch

from tests.reference.fedprox import fedprox
from tests.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


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
    # At rate 0 only statistics move, by the forward passes alone.
    assert same(play("fedavg", lr=0.0).model, play("fedprox(mu=1.0)", lr=0.0).model)


def test_the_head_that_babu_froze_adds_nothing():
    run = play("fedprox(mu=1.0) + fedbabu", n=1)
    assert torch.equal(run.model["head.weight"], tiny_net().head.weight.detach())
