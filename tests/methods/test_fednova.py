"""FedNova: an average per step."""

import pytest
import torch

from tests.reference.fednova import accumulation, fednova
from tests.support.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task

OPTIMA = torch.tensor([1.0, -2.0, 7.0], dtype=torch.float64)


def quadratic(z, y):
    return 0.5 * (z.flatten() - OPTIMA[y]).square().mean()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_a_plain_torch_loop_with_unequal_steps(momentum):
    data = tiny_data(13, 4, 7)
    task = tiny_task("fednova", data, epochs=2, momentum=momentum)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    assert len({len(plan) for plan in plans[0]}) > 1
    wanted = fednova(tiny_net(), pairs(data), plans, 0.1, momentum)
    close(rounds(task, data, 3).model, wanted.state_dict(), atol=1e-10)


def test_equal_steps_are_fedavg():
    data = tiny_data(8, 8, 8)
    for settings in ({}, {"momentum": 0.9}):
        close(play("fednova", data, n=3, **settings).model, play("fedavg", data, n=3, **settings).model, atol=1e-13)
    sizes = tiny_data(13, 4, 7)
    close(play("fednova", sizes, n=3, steps=3).model, play("fedavg", sizes, n=3, steps=3).model, atol=1e-13)


@pytest.mark.parametrize(("steps", "momentum", "mu"), [(1, 0.0, 0.0), (7, 0.0, 0.0), (7, 0.9, 0.0), (7, 0.0, 0.5)])
def test_a_is_the_sum_of_the_accumulation_vector(steps, momentum, mu):
    run = play(
        f"fednova(mu={mu})", ones(2), n=1, model=Scalar(), loss=quadratic, steps=steps, momentum=momentum, batch_size=2
    )
    assert float(run.uploads["a"].parts["fednova"]["a"]) == pytest.approx(sum(accumulation(steps, momentum, 0.1, mu)))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}])
def test_a_counts_how_far_unit_gradients_carry(settings):
    def linear(z, y):
        return z.mean()

    run = play(
        "fedprox(mu=0.5) + fednova(mu=0.5)",
        ones(2),
        n=1,
        model=Scalar(),
        loss=linear,
        steps=5,
        batch_size=2,
        **settings,
    )
    walked = (1.0 - float(run.model["head.weight"])) / 0.1
    assert float(run.uploads["a"].parts["fednova"]["a"]) == pytest.approx(walked, abs=1e-12)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}])
def test_mu_is_that_of_the_methods_fedprox(settings):
    data = tiny_data(13, 4, 7)
    told, found = (play(f"fedprox(mu=0.5) + {t}", data, **settings) for t in ("fednova(mu=0.5)", "fednova"))
    close(told.model, found.model, atol=0)
    other = play("fedprox(mu=0.5) + fednova(mu=0)", data, **settings)
    assert not torch.equal(other.model["head.weight"], found.model["head.weight"])


def test_equal_steps_with_a_proximal_term_are_fedprox():
    data = tiny_data(8, 8, 8)
    prox = play("fedprox(mu=0.5)", data, n=3)
    close(play("fedprox(mu=0.5) + fednova", data, n=3).model, prox.model, atol=1e-13)


def test_the_authors_program_moves_by_the_numbers_of_steps_when_there_is_a_proximal_term():
    data = tiny_data(13, 4, 7)
    ours, theirs = (play(f"fedprox(mu=0.5) + fednova(variant={v})", data, n=1) for v in ("paper", "author"))
    sizes, steps = {k: len(s) / 24 for k, s in data.items()}, {k: -(-len(s) // 4) for k, s in data.items()}
    longer = sum(sizes[k] * steps[k] for k in data)
    longer /= sum(sizes[k] * sum(accumulation(steps[k], 0.0, 0.1, 0.5)) for k in data)
    start = dict(tiny_net().named_parameters())["head.weight"].detach()
    one, other = (r.model["head.weight"] - start for r in (ours, theirs))
    torch.testing.assert_close(other, one * longer, atol=1e-12, rtol=0)
    plain = [play(f"fednova(variant={v})", data, n=2).model for v in ("paper", "author")]
    close(*plain, atol=0)


def fixed_point(text, lr):
    """The fixed point of a round: on quadratics a round is an affine map, known from two of its values."""
    data = ones(2, 3, 9)
    at_0, at_1 = (
        float(play(text, data, n=1, model=Scalar(w), loss=quadratic, lr=lr, batch_size=1).model["head.weight"])
        for w in (0.0, 1.0)
    )
    return at_0 / (1 - (at_1 - at_0))


def test_clients_that_take_more_steps_do_not_pull_harder():
    sizes = torch.tensor([2.0, 3.0, 9.0], dtype=torch.float64)
    optimum = float((sizes * OPTIMA).sum() / sizes.sum())
    pulled = float((sizes**2 * OPTIMA).sum() / (sizes**2).sum())  # steps grow with size: counted twice
    assert fixed_point("fednova", 1e-5) == pytest.approx(optimum, abs=1e-3)
    assert fixed_point("fedavg", 1e-5) == pytest.approx(pulled, abs=1e-3)
    assert abs(pulled - optimum) > 0.5
    # What is left is of the order of the rate.
    far, near = (abs(fixed_point("fednova", lr) - optimum) for lr in (1e-2, 1e-3))
    assert far / near == pytest.approx(10, rel=0.1)


def test_statistics_are_averaged_plainly():
    data = tiny_data(13, 4, 7)
    run = play("fednova", data, n=2)
    mean = sum(len(s) * run.uploads[k].model["norm.running_var"] for k, s in data.items()) / 24
    torch.testing.assert_close(run.model["norm.running_var"], mean, atol=1e-14, rtol=0)


def test_a_single_client_is_fedavg():
    data = tiny_data(9)
    close(play("fednova", data, n=3).model, play("fedavg", data, n=3).model, atol=1e-13)
