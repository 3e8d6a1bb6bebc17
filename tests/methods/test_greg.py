"""GReg: the symmetric divergence, its second pass, and the smoothed statistics."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.round import base_phases, begin, broadcast, draws, initial_state
from fednorms.core.states import Client
from fednorms.core.step import step_key, step_view
from fednorms.core.tree import Tree
from fednorms.methods.greg import GReg, symmetric_kl
from tests.reference.greg import greg, symmetric_divergence
from tests.support.tiny import Run, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

STATISTICS = ("norm.running_mean", "norm.running_var")


def logits(n=6, scale=3.0):
    return scale * torch.randn(n, 4, dtype=torch.float64)


@pytest.mark.parametrize(("alpha", "rho"), [(1.0, 0.1), (0.0, 0.3), (2.0, 1.0)])
def test_equals_a_plain_torch_loop_over_three_rounds(alpha, rho):
    data = tiny_data()
    task = tiny_task(f"greg(alpha={alpha}, rho={rho})", data, epochs=2)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    close(rounds(task, data, 3).model, greg(tiny_net(), pairs(data), plans, 0.1, alpha, rho).state_dict())


def test_the_divergence_by_its_definition_symmetric_and_not_negative():
    a, b = logits(), logits()
    torch.testing.assert_close(symmetric_kl(a, b), symmetric_divergence(a, b), atol=1e-12, rtol=0)
    torch.testing.assert_close(symmetric_kl(a, b), symmetric_kl(b, a), atol=1e-14, rtol=0)
    for i in range(len(a)):
        assert symmetric_kl(a[i : i + 1], b[i : i + 1]) >= 0
    assert symmetric_kl(a, a + 5.0).abs() < 1e-12  # softmax ignores a constant


def test_equal_statistics_give_no_penalty_and_no_gradient():
    # The broadcast statistics are exactly the biased ones of the batch: both passes predict alike.
    model, x = tiny_net(), tiny_data()["b"].x
    with torch.no_grad():
        h = model.conv(x)
        model.norm.running_mean.copy_(h.mean((0, 2, 3)))
        model.norm.running_var.copy_(h.var((0, 2, 3), unbiased=False))
    weights = [p.requires_grad_() for p in model.parameters()]
    frozen = {k: model.norm.get_buffer(k).clone() for k in ("running_mean", "running_var")}
    by_batch = model(x)
    h = nn.functional.batch_norm(
        model.conv(x), frozen["running_mean"], frozen["running_var"], model.norm.weight, model.norm.bias
    )
    by_sent = model.head(model.pool(torch.relu(h)).flatten(1))
    penalty = symmetric_kl(by_batch, by_sent)
    assert penalty.abs() < 1e-12
    for g in torch.autograd.grad(penalty, weights):
        assert g.abs().max() < 1e-10


@pytest.mark.parametrize("text", ["greg", "fednn(tau=1.0) + greg", "wn + agn(variant=author) + greg"])
def test_both_passes_of_a_step_draw_the_same_noise(text):
    """With the statistics of the batch sent down, there is nothing to regularize, whatever else a layer draws."""
    data = tiny_data(6)
    task = tiny_task(text, data, batch_size=6)
    state = rounds(task, data, 1).server
    sent = broadcast(task, state)
    carry, _ = begin(task, sent, Client("a", data["a"]))
    batches, _ = next(draws(task, carry, base_phases(task, carry.context)))
    with task.net.watching(lambda m: m is task.net.module.norm) as seen:
        view = step_view(task, carry, batches[0], 0)
        with noise.keyed(step_key(carry, 0)):
            view.forward(carry.params, view.x)
    x = seen["norm"].detach()
    for name, value in {"running_mean": x.mean((0, 2, 3)), "running_var": x.var((0, 2, 3), unbiased=False)}.items():
        carry.buffers[f"norm.{name}"].copy_(value)
        carry.start_buffers[f"norm.{name}"] = value
    with noise.keyed(step_key(carry, 0)), torch.no_grad():
        one, two = (view.forward(carry.params, view.x, stats=s)[0] for s in ("batch", "broadcast"))
    torch.testing.assert_close(one, two, atol=1e-10 if "author" not in text else 1e-2, rtol=0)


def test_gap_of_losses_is_bounded_by_the_divergence():
    a, b, y = logits(200), logits(200), torch.randint(4, (200,))
    p, q = (t.softmax(1).gather(1, y[:, None])[:, 0] for t in (a, b))
    gap = (p.log() - q.log()).abs()
    for i in range(200):
        bound = 2 / min(p[i], q[i]) * symmetric_kl(a[i : i + 1], b[i : i + 1]).sqrt()
        assert gap[i] <= bound + 1e-12


def test_the_second_pass_touches_no_buffer():
    # Same weights and batches: the statistics after one step do not depend on alpha.
    data = tiny_data()
    start = play("fedavg", data, n=1)
    sent = {}
    for text in ("greg(alpha=0, rho=1)", "greg(alpha=5.0, rho=1)"):
        task = tiny_task(text, data, steps=1)
        sent[text] = rounds(task, data, 1, run=start_of(task, start)).uploads["a"].model
    one, other = sent.values()
    assert not torch.equal(one["conv.weight"], other["conv.weight"])
    for name in (*STATISTICS, "norm.num_batches_tracked"):
        assert torch.equal(one[name], other[name])


def start_of(task, run):
    """Round 1 of another task, from a model that a run left."""
    return Run(replace(initial_state(task), round=1, model=run.model))


def test_alpha_zero_with_rho_one_is_fedavg_bit_for_bit():
    assert same(play("greg(alpha=0, rho=1)", n=3).model, play("fedavg", n=3).model)


def test_the_first_round_has_no_penalty():
    assert same(play("greg(rho=1)", n=1).model, play("fedavg", n=1).model)
    assert not same(play("greg(rho=1)", n=2).model, play("fedavg", n=2).model)


def test_rho_zero_never_changes_statistics():
    run, start = play("greg(rho=0)", n=3), tiny_net().state_dict()
    assert all(torch.equal(run.model[k], start[k]) for k in STATISTICS)


def test_smoothing_has_its_closed_form():
    # At rate 0 with full batches every client sends m_k = 0.9 S + 0.1 batch_k; with s = mean batch_k fixed,
    # S <- S + rho 0.1 (s - S), so the way still to go shrinks by 1 - 0.1 rho per round.
    rho, n = 0.3, 4
    run = play(f"greg(rho={rho}, alpha=0)", tiny_data(6, 6), n=n, lr=0.0, batch_size=6)
    data = tiny_data(6, 6)
    s = sum(tiny_net().conv(d.x).mean((0, 2, 3)) for d in data.values()).detach() / 2
    torch.testing.assert_close(run.model["norm.running_mean"], s * (1 - (1 - 0.1 * rho) ** n), atol=1e-12, rtol=0)


def test_the_ema_of_a_constant_aggregate():
    s, state = torch.tensor([2.0, -3.0], dtype=torch.float64), Tree(v=torch.zeros(2, dtype=torch.float64))
    aggregate = Tree(v=s)
    for t in range(1, 6):
        state = state + GReg(rho=0.1).stats(aggregate - state, None)
        torch.testing.assert_close(state["v"], (1 - 0.9**t) * s, atol=1e-14, rtol=0)


def test_detaching_the_global_pass_changes_the_gradient_only():
    data = tiny_data()
    start = play("fedavg", data, n=1)
    tasks = [tiny_task(f"greg(detach_global={v})", data, steps=1) for v in ("true", "false")]
    one, other = (rounds(t, data, 1, run=start_of(t, start)).uploads["a"] for t in tasks)
    assert one.metrics["loss"] == other.metrics["loss"]
    assert not torch.equal(one.model["conv.weight"], other.model["conv.weight"])


@pytest.mark.parametrize("text", ["silobn + greg", "fedbn + greg", "gn(groups=2) + greg", "hbn + greg"])
def test_needs_shared_statistics(text):
    with pytest.raises(BadInput, match=r"greg has nothing to act on.*running statistics are shared"):
        tiny_task(text, tiny_data())
