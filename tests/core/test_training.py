"""Local training: batch plans, the optimiser against torch.optim, clipping, schedules."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Phase
from fednorms.core.round import begin, broadcast, enter, initial_state
from fednorms.core.states import Client, ClientState, Task
from fednorms.core.training import Optimiser, Training, batch_plan, clipped
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.methods.registry import method
from tests.support.tiny import close, plan_of, play, tiny_data, tiny_net, tiny_task

SIZES = st.integers(1, 40)
BATCHES = st.integers(1, 12)


def test_settings_that_do_nothing_are_noted():
    assert Training().without_effect == Training(schedule="exp", decay=0.9, momentum=0.9, epochs=3).without_effect == []
    idle = Training(decay=0.9, optimiser="adamw", momentum=0.5, steps=4, epochs=2)
    assert [note.split()[0] for note in idle.without_effect] == ["decay", "momentum", "epochs"]
    result = fn.run("fedavg", rounds=1, training=Training(decay=0.9))
    assert result.notes == ["decay 0.9 has no effect: the schedule is const"]


# -- batch plans ------------------------------------------------------------------------------------------------
@given(SIZES, BATCHES, st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_every_epoch_holds_every_row_once(n, size, epochs, seed):
    plan, dropped = batch_plan(n, Training(batch_size=size), Phase(epochs=epochs), seed)
    per = -(-n // size)
    assert dropped == 0
    assert len(plan) == per * epochs
    for e in range(epochs):
        epoch = plan[e * per : (e + 1) * per]
        assert sorted(torch.cat(epoch).tolist()) == list(range(n))
        assert [len(b) for b in epoch[:-1]] == [size] * (per - 1)
        assert 1 <= len(epoch[-1]) <= size


@given(SIZES, BATCHES, st.integers(0, 9))
def test_a_plan_is_a_function_of_its_seed(n, size, seed):
    one, two = (batch_plan(n, Training(batch_size=size), Phase(epochs=2), seed)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_other_seeds_and_other_epochs_have_other_orders():
    t = Training(batch_size=50)
    a, b = batch_plan(50, t, Phase(epochs=2), 0)[0]
    (c,) = batch_plan(50, t, Phase(), 1)[0]
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


@given(SIZES, BATCHES)
def test_drop_leaves_full_batches_and_counts_the_rest(n, size):
    plan, dropped = batch_plan(n, Training(batch_size=size, last="drop"), Phase(epochs=2), 3)
    if n >= size:
        assert {len(b) for b in plan} == {size}
        assert dropped == 2 * (n % size)
        assert sum(len(b) for b in plan) + dropped == 2 * n
    else:  # a client smaller than one batch still trains
        assert [len(b) for b in plan] == [n, n]
        assert dropped == 0


@given(SIZES, BATCHES)
def test_fill_makes_all_batches_full_from_the_same_epoch(n, size):
    plan, dropped = batch_plan(n, Training(batch_size=size, last="fill"), Phase(), 3)
    rows = torch.cat(plan)
    assert {len(b) for b in plan} == {size}
    assert dropped == 0
    assert sorted(rows[:n].tolist()) == list(range(n))
    again = rows[n:].tolist()
    assert again == (rows[:n].tolist() * (size // n + 1))[: len(again)]


@given(SIZES, BATCHES, st.sampled_from(["keep", "drop", "fill"]))
def test_a_lone_last_image_is_dropped_where_batch_normalisation_needs_two(n, size, last):
    plan, dropped = batch_plan(n, Training(batch_size=size, last=last), Phase(), 0, needs_two=True)
    if plan and size > 1:
        assert len(plan[-1]) > 1
    rows = {r for b in plan for r in b.tolist()}
    assert n - len(rows) == dropped


@given(SIZES, BATCHES, st.integers(1, 25), st.integers(1, 3))
def test_steps_count_batches_not_epochs(n, size, steps, draws):
    plan, _ = batch_plan(n, Training(batch_size=size), Phase(epochs=None, steps=steps, draws=draws), 0)
    assert len(plan) == steps * draws


@given(SIZES, BATCHES, st.integers(1, 3))
def test_there_is_at_least_one_step_whatever_it_draws(n, size, draws):
    plan, _ = batch_plan(n, Training(batch_size=size), Phase(epochs=1, draws=draws), 0)
    assert len(plan) >= max(draws, -(-n // size))


# -- the optimiser ----------------------------------------------------------------------------------------------
def drive(settings, make, steps=7, clip=None, dtype=torch.float64):
    """The same gradients through ours and torch's optimiser."""
    torch.manual_seed(0)
    start = {"w": torch.randn(3, 4, dtype=dtype), "b": torch.randn(3, dtype=dtype)}
    ours = Tree(start).clone()
    theirs = {k: v.clone().requires_grad_() for k, v in start.items()}
    training = Training(**settings)
    optimiser = Optimiser.fresh(training, ours, training.lr, ours["w"])
    reference = make(theirs.values())
    for _ in range(steps):
        g = Tree({k: torch.randn_like(v) for k, v in start.items()})
        for k, p in theirs.items():
            p.grad = g[k].clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
            g = clipped(g, clip)
        reference.step()
        optimiser.update(ours, g)
    close(ours, {k: v.detach() for k, v in theirs.items()}, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sgd_is_torchs(momentum, decay, clip, dtype):
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": decay}
    drive(settings, lambda p: torch.optim.SGD(p, **settings), clip=clip, dtype=dtype)


def test_a_gradient_may_lie_differently_in_memory_than_its_weights():
    w = torch.arange(24.0).reshape(2, 3, 2, 2)
    g = torch.randn(2, 3, 2, 2)
    for weights, gradient in [(w, g.contiguous(memory_format=torch.channels_last)), (w.transpose(0, 3), g.mT)]:
        params = Tree(w=weights.clone())
        want = params["w"] - 0.5 * gradient
        Optimiser.fresh(Training(lr=0.5), params, 0.5, w).update(params, Tree(w=gradient))
        torch.testing.assert_close(params["w"], want)


def test_a_gradient_may_be_of_another_dtype_than_its_weights():
    params = Tree(w=torch.ones(3))
    Optimiser.fresh(Training(lr=0.5), params, 0.5, params["w"]).update(params, Tree(w=torch.ones(3).double()))
    assert params["w"].tolist() == [0.5, 0.5, 0.5]


def test_a_kept_velocity_may_lie_differently_in_memory_than_its_weights():
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), method("fedavg"))
    training = Training(lr=0.5, momentum=0.5, keep_momentum=True)
    task = Task(net, training, 1, 0, 1, 8)
    velocity = torch.arange(12.0).reshape(4, 3).T  # as it comes back from a disk, say
    state = ClientState(1, Tree(), {}, Tree({"1.weight": velocity}))
    client = Client("a", Split(torch.zeros(8, 1, 2, 2), torch.zeros(8, dtype=torch.long)), state)
    carry, _ = begin(task, broadcast(task, initial_state(task)), client)
    enter(task, carry, Phase(epochs=1))
    before = carry.params["1.weight"].detach().clone()
    with torch.no_grad():
        carry.optimiser.update(carry.params, Tree({"1.weight": torch.zeros(3, 4)}))
    torch.testing.assert_close(carry.params["1.weight"].detach(), before - 0.5 * 0.5 * velocity)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_adamw_is_torchs(decay):
    settings = {"lr": 0.01, "weight_decay": decay}
    drive({**settings, "optimiser": "adamw"}, lambda p: torch.optim.AdamW(p, **settings))


@pytest.mark.parametrize("clip", [0.1, 3.0, 1e9])
def test_clipping_is_torchs(clip):
    g = Tree(w=torch.randn(5, 2, dtype=torch.float64), b=torch.randn(2, dtype=torch.float64))
    p = [v.clone().requires_grad_() for v in g.values()]
    for tensor, v in zip(p, g.values(), strict=True):
        tensor.grad = v.clone()
    torch.nn.utils.clip_grad_norm_(p, clip)
    for tensor, v in zip(p, clipped(g, clip).values(), strict=True):
        torch.testing.assert_close(v, tensor.grad, atol=1e-12, rtol=0)
    assert clipped(Tree(), 1.0) == {}


def test_tensors_without_a_gradient_stay_even_under_weight_decay():
    w = Tree(a=torch.ones(2), b=torch.ones(2))
    training = Training(lr=0.1, weight_decay=0.5, momentum=0.9)
    Optimiser.fresh(training, w, 0.1, w["a"]).update(w, Tree(a=torch.ones(2)))
    assert w["b"].tolist() == [1.0, 1.0]
    assert w["a"].tolist() != [1.0, 1.0]


def test_weight_decay_comes_after_clipping():
    # With a gradient clipped to nothing only the decay moves the weights.
    data = tiny_data(4)
    still = play("fedavg", data, n=1, lr=0.1, clip=1e-12, weight_decay=0.5)
    start = tiny_net().conv.weight.detach()
    torch.testing.assert_close(still.model["conv.weight"], start * (1 - 0.05), atol=1e-9, rtol=0)


def test_momentum_starts_afresh_every_round_unless_kept():
    data = tiny_data(8)
    fresh, kept = (play("fedavg", data, n=2, momentum=0.9, keep_momentum=k) for k in (False, True))
    one, other = (play("fedavg", data, n=1, momentum=0.9, keep_momentum=k) for k in (False, True))
    close(one.model, other.model, atol=0)  # the first round has nothing to keep
    assert not torch.equal(fresh.model["conv.weight"], kept.model["conv.weight"])
    assert not fresh.states["a"].velocity
    assert kept.states["a"].velocity


def test_kept_momentum_is_one_long_run_of_torchs_sgd():
    data = tiny_data(8)
    task = tiny_task("fedavg", data, momentum=0.9, keep_momentum=True)
    model = tiny_net().train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for t in range(3):
        for rows in plan_of(task, data["a"], "a", t):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(data["a"].x[rows]), data["a"].y[rows]).backward()
            optimiser.step()
    close(play("fedavg", data, n=3, momentum=0.9, keep_momentum=True).model, model.state_dict())


def test_kept_momentum_covers_every_phase():
    run = play("fedrep(head_epochs=1)", tiny_data(8), n=1, momentum=0.9, keep_momentum=True)
    assert run.states["a"].velocity.keys() == {n for n, _ in tiny_net().named_parameters()}


# -- schedules --------------------------------------------------------------------------------------------------
def test_schedules_by_their_formulas():
    rounds = 200
    for t in (0, 1, 99, 100, 149, 150, 199):
        assert Training(lr=0.1).rate(t, rounds) == 0.1
        assert Training(lr=0.1, schedule="exp").rate(t, rounds) == pytest.approx(0.1 * 0.998**t)
        cut = 1 if t < 100 else 0.1 if t < 150 else 0.01
        assert Training(lr=0.1, schedule="step").rate(t, rounds) == pytest.approx(0.1 * cut)
        wave = 0.05 * (1 + math.cos(math.pi * t / rounds))
        assert Training(lr=0.1, schedule="cosine").rate(t, rounds) == pytest.approx(wave)


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 320])
def test_the_step_schedule_cuts_at_half_and_three_quarters_rounded_down(rounds):
    rates = [Training(lr=1.0, schedule="step").rate(t, rounds) for t in range(rounds)]
    wanted = [0.1 ** ((t >= rounds // 2) + (t >= 3 * rounds // 4)) for t in range(rounds)]
    assert rates == pytest.approx(wanted)


def test_the_rate_is_constant_inside_a_round_and_in_force_in_it():
    data = tiny_data(4)
    run = play("nonorm", data, n=2, schedule="exp", decay=0.5, lr=0.2)
    model = tiny_net()
    model.norm = torch.nn.Identity()
    for rate in (0.2, 0.1):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(data["a"].x), data["a"].y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    close(run.model, model.state_dict(), atol=1e-12)


# -- refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"lr": -0.1}, "lr must be a finite number >= 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": float("inf")}, "lr must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"decay": 0.0}, "decay must be"),
        ({"clip": 0.0}, "clip must be"),
        ({"steps": 0}, "steps must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"optimiser": "adamw", "keep_momentum": True}, "keep_momentum must be false with adamw"),
        ({"epochs": 0, "lr": -1.0}, "epochs must be .*; lr must be"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        Training(**settings)
