"""FedCM: the federation's last direction in every local step."""

import pytest
import torch

from fednorms.core.errors import BadInput
from tests.reference.fedcm import fedcm
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_equals_a_plain_torch_loop():
    data = tiny_data(8, 8)
    task = tiny_task("fedcm(alpha=0.3)", data, epochs=2)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    close(rounds(task, data, 3).model, fedcm(tiny_net(), pairs(data), plans, 0.1, 0.3, steps=4).state_dict())


def test_alpha_one_is_fedavg_bit_for_bit():
    assert same(play("fedavg").model, play("fedcm(alpha=1)").model)


def test_the_direction_is_the_gradient_if_there_is_one_client_and_one_step():
    """One full batch, one step: D is alpha g, whichever the rate and its schedule."""
    runs = [play("fedcm(alpha=0.5)", tiny_data(4), n=1, steps=1, lr=lr) for lr in (0.1, 0.01)]
    close(runs[0].server.parts["fedcm"], runs[1].server.parts["fedcm"], atol=1e-9)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_counts_in_the_steps(momentum):
    """A constant gradient 1 gives D = alpha, with or without momentum."""
    from tests.support.tiny import Scalar, ones

    def linear(z, y):
        return z.mean()

    run = play(
        "fedcm(alpha=0.5)", ones(2), n=1, model=Scalar(1.0), loss=linear, steps=3, batch_size=2, momentum=momentum
    )
    assert float(run.server.parts["fedcm"]["head.weight"]) == pytest.approx(0.5, abs=1e-12)


def test_a_rate_of_zero_keeps_the_direction():
    run = play("fedcm", n=2, lr=0.0)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in run.server.parts["fedcm"].values())


def test_it_needs_sgd():
    with pytest.raises(BadInput, match="fedcm"):
        tiny_task("fedcm", tiny_data(), optimizer="adamw")
