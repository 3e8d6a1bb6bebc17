"""Per-FedAvg: the gradient after an inner step."""

import copy

import pytest
import torch
from torch import nn

from fednorms.core.round import begin, broadcast, train
from fednorms.core.states import Client
from tests.reference.perfedavg import meta_step
from tests.support.tiny import Scalar, close, ones, plan_of, play, rounds, tiny_data, tiny_net, tiny_task


def square(z, y):
    return z.square().mean()  # a w^2 / 2 with a = 2


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("alpha=0.1", 0.2),
        ("alpha=0.1, variant=exact", 0.36),
        ("alpha=0.1, variant=hessian_free", 0.36),
        ("alpha=0.1, variant=hessian_free, delta=0.5", 0.36),
    ],
)
def test_one_step_on_a_quadratic_by_hand(options, wanted):
    run = play(
        f"perfedavg({options})",
        ones(2),
        n=1,
        model=Scalar(1.0),
        loss=square,
        lr=0.5,
        batch_size=2,
        steps=1,
    )
    assert float(run.model["head.weight"]) == pytest.approx(wanted, abs=1e-9)
    variant = next((v for v in ("hessian_free", "exact") if v in options), "first")
    step = meta_step(lambda w, batch: 2 * w, 1.0, 0.1, 0.5, variant, h=lambda w, batch: 2.0)
    assert step == pytest.approx(wanted)


@pytest.mark.parametrize("variant", ["first", "exact", "hessian_free"])
def test_three_batches_three_gradients(variant):
    # With a cubic loss the order and the point of every gradient matter; the label scales the batch.
    def cubic(z, y):
        return (z**3).mean()

    run = play(
        f"perfedavg(alpha=0.05, variant={variant}, delta=0.01)",
        ones(3),
        n=1,
        model=Scalar(1.5),
        loss=cubic,
        lr=0.1,
        batch_size=1,
        steps=2,
    )
    w = 1.5
    for _ in range(2):
        w = meta_step(lambda v, batch: 3 * v * v, w, 0.05, 0.1, variant, 0.01, h=lambda v, batch: 6 * v)
    assert float(run.model["head.weight"]) == pytest.approx(w, abs=1e-12)


def test_alpha_zero_means_the_rounds_rate():
    kw = {"model": Scalar(1.0), "loss": square, "lr": 0.1, "batch_size": 2, "steps": 1}
    run = play("perfedavg", ones(2), n=1, **kw)
    assert float(run.model["head.weight"]) == pytest.approx(1 - 0.1 * 2 * 0.8, abs=1e-12)


def test_first_order_equals_a_plain_torch_loop():
    data = tiny_data(16)
    task = tiny_task("nonorm + perfedavg(alpha=0.2)", data, epochs=2)
    run = rounds(task, data, 1)
    local = tiny_net()
    local.norm = nn.Identity()
    x, y = data["a"].x, data["a"].y
    batches = plan_of(task, data["a"], "a", 0)
    for i in range(0, len(batches) - 1, 2):
        inner = copy.deepcopy(local)
        nn.functional.cross_entropy(inner(x[batches[i]]), y[batches[i]]).backward()
        with torch.no_grad():
            for p in inner.parameters():
                p -= 0.2 * p.grad
        inner.zero_grad()
        nn.functional.cross_entropy(inner(x[batches[i + 1]]), y[batches[i + 1]]).backward()
        with torch.no_grad():
            for p, q in zip(local.parameters(), inner.parameters(), strict=True):
                p -= 0.1 * q.grad
    close(run.model, local.state_dict(), atol=1e-12)


def test_statistics_come_from_the_first_pass_only():
    # With both rates zero only the inner batch is recorded, once per step.
    data = tiny_data(8)
    task = tiny_task("perfedavg(alpha=0.1)", data, lr=0.0)
    run = rounds(task, data, 1)
    assert int(run.model["norm.num_batches_tracked"]) == 1
    rows = plan_of(task, data["a"], "a", 0)[0]
    h = tiny_net().conv(data["a"].x[rows]).detach()
    torch.testing.assert_close(run.model["norm.running_mean"], 0.1 * h.mean((0, 2, 3)), atol=1e-12, rtol=0)


def test_a_client_with_a_single_batch_still_trains():
    run = play("perfedavg(variant=hessian_free)", tiny_data(3), n=1)
    assert run.uploads["a"].metrics["steps"] == 1
    assert not torch.equal(run.model["conv.weight"], tiny_net().conv.weight)


@pytest.mark.parametrize("settings", [{"weight_decay": 0.5}, {"clip": 0.01}, {"optimizer": "adamw"}, {"momentum": 0.9}])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_the_inner_step_of_a_test_is_that_of_training(settings, alpha):
    data = ones(2)
    options = {"model": Scalar(1.0), "loss": square, "lr": 0.1, "batch_size": 2, "schedule": "step"}
    task = tiny_task(f"perfedavg(alpha={alpha})", data, rounds=4, **options, **settings)
    run = rounds(task, data, 4)
    w = float(run.model["head.weight"])
    carry, _ = begin(task, broadcast(task, run.server), Client("a", data["a"]), evaluating=True)
    train(task, carry, task.method.evaluation().phases)
    rate = alpha or 0.1 * 0.01  # what the last round trained with, after two cuts to a tenth
    assert float(carry.model()["head.weight"]) == pytest.approx(w - rate * 2 * w, rel=1e-12)


def test_beta_is_the_rate_of_the_outer_step():
    kw = {"model": Scalar(1.0), "loss": square, "lr": 0.1, "batch_size": 2, "steps": 1}
    run = play("perfedavg(beta=0.5)", ones(2), n=1, **kw)
    assert float(run.model["head.weight"]) == pytest.approx(1 - 0.5 * 2 * 0.8, abs=1e-12)


def test_it_is_tested_after_one_plain_inner_step_on_own_training_data():
    data = ones(2)
    task = tiny_task("perfedavg(alpha=0.1)", data, model=Scalar(1.0), loss=square, lr=0.5, batch_size=2)
    run = rounds(task, data, 0)
    carry, _ = begin(task, broadcast(task, run.server), Client("a", data["a"]), evaluating=True)
    train(task, carry, task.method.evaluation().phases)
    assert float(carry.model()["head.weight"]) == pytest.approx(1 - 0.1 * 2)
    assert carry.steps == 1


def test_exact_and_hessian_free_agree_on_a_network():
    data = tiny_data(12, 9)
    exact = play("perfedavg(alpha=0.3, variant=exact)", data, n=2)
    free = play("perfedavg(alpha=0.3, variant=hessian_free, delta=1e-5)", data, n=2)
    first = play("perfedavg(alpha=0.3)", data, n=2)
    close(exact.model, free.model, atol=1e-6)
    assert (exact.model["head.weight"] - first.model["head.weight"]).abs().max() > 1e-4


def test_exact_equals_differentiating_twice_by_hand():
    data = tiny_data(12)
    task = tiny_task("nonorm + perfedavg(alpha=0.2, variant=exact)", data)
    run = rounds(task, data, 1)
    net = tiny_net()
    net.norm = nn.Identity()
    one, two, three = plan_of(task, data["a"], "a", 0)
    x, y = data["a"].x, data["a"].y
    names = [n for n, _ in net.named_parameters()]
    w = [p.detach().clone().requires_grad_() for p in net.parameters()]

    def gradient(at, rows, graph=False):
        logits = torch.func.functional_call(net, dict(zip(names, at, strict=True)), (x[rows],))
        return torch.autograd.grad(nn.functional.cross_entropy(logits, y[rows]), at, create_graph=graph)

    inner = [(p - 0.2 * g).detach().requires_grad_() for p, g in zip(w, gradient(w, one), strict=True)]
    v = gradient(inner, two)
    hessian = torch.autograd.grad(gradient(w, three, graph=True), w, grad_outputs=v)
    wanted = {n: (p - 0.1 * (d - 0.2 * h)).detach() for n, p, d, h in zip(names, w, v, hessian, strict=True)}
    close(run.model.pick(wanted), wanted, atol=1e-12)


def test_the_hessian_sees_the_terms_of_other_parts():
    # mu/2 (w - w_0)^2 on top of w^2: curvature 2 + mu, gradient 2 w at the start.
    settings = {"model": Scalar(1.0), "loss": square, "lr": 0.5, "batch_size": 2, "steps": 1}
    run = play("fedprox(mu=1.0) + perfedavg(alpha=0.1, variant=exact)", ones(2), n=1, **settings)
    v = 2 * 0.8 + (0.8 - 1.0)
    assert float(run.model["head.weight"]) == pytest.approx(1 - 0.5 * (v - 0.1 * 3 * v), abs=1e-12)


def test_a_linear_loss_has_no_curvature():
    def linear(z, y):
        return z.mean()

    settings = {"model": Scalar(1.0), "loss": linear, "lr": 0.5, "batch_size": 2, "steps": 1}
    run = play("perfedavg(alpha=0.1, variant=exact)", ones(2), n=1, **settings)
    assert float(run.model["head.weight"]) == pytest.approx(0.5, abs=1e-15)
