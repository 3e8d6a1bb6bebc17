"""Batch plans: every row once an epoch, short last batches, steps and draws."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.batches import batch_plan
from fednorms.core.part import Phase
from fednorms.core.training import Training

SIZES = st.integers(1, 40)
BATCHES = st.integers(1, 12)


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
def test_a_last_batch_of_one_is_dropped_where_batch_normalization_needs_two(n, size, last):
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
