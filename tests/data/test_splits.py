"""Division into splits: exhaustive, disjoint, stratified, by group, and determined by names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.errors import BadInput
from fednorms.data import split

labels = st.lists(st.integers(0, 5), min_size=0, max_size=80)
fractions = st.tuples(st.floats(0, 0.45), st.floats(0, 0.45)).map(lambda f: {"val": f[0], "test": f[1]})


def once(parts, n):
    return sorted(np.concatenate(list(parts.values())).tolist()) == list(range(n))


@given(labels, fractions, st.integers(0, 5))
def test_every_sample_is_in_exactly_one_part(y, wish, seed):
    parts = split(np.array(y, dtype=np.int64), wish, seed)
    assert once(parts, len(y))
    assert all((np.diff(at) > 0).all() for at in parts.values())


@given(labels, fractions)
def test_classes_are_divided_as_requested_and_none_is_missing_from_train(y, wish):
    y = np.array(y, dtype=np.int64)
    parts = split(y, wish)
    shares = {"train": 1 - sum(wish.values()), **wish}
    for label in np.unique(y):
        n = int((y == label).sum())
        assert (y[parts["train"]] == label).any()
        for part, share in shares.items():
            assert abs(int((y[parts[part]] == label).sum()) - share * n) <= 2.5


def test_totals_are_as_requested_even_with_many_small_classes():
    y = np.arange(300) // 3
    parts = split(y, {"val": 0.1, "test": 0.2})
    assert abs(len(parts["test"]) - 60) <= 3
    assert abs(len(parts["val"]) - 30) <= 3


def test_zero_fractions_are_empty_and_single_samples_are_trained_on():
    parts = split([0, 1, 2], {"val": 0.0, "test": 0.3})
    assert len(parts["val"]) == 0
    assert len(parts["train"]) == 3


def test_depends_on_names_only():
    y = torch.arange(60) % 3
    first = split(y, {"test": 0.3}, 0, "a")
    torch.manual_seed(99)
    np.random.default_rng(3).random()
    again = split(y.tolist(), {"test": 0.3}, 0, "a")
    assert first["test"].tolist() == again["test"].tolist()
    assert first["test"].tolist() != split(y, {"test": 0.3}, 1, "a")["test"].tolist()
    assert first["test"].tolist() != split(y, {"test": 0.3}, 0, "b")["test"].tolist()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=80),
    fractions,
    st.integers(0, 3),
)
def test_no_group_is_divided(samples, wish, seed):
    y, groups = (np.array(column) for column in zip(*samples, strict=True))
    parts = split(y, wish, seed, groups=groups)
    assert once(parts, len(y))
    homes = [set(groups[at].tolist()) for at in parts.values()]
    assert sum(map(len, homes)) == len(set().union(*homes))
    for part, share in wish.items():
        assert share > 0 or len(parts[part]) == 0


def test_groups_are_stratified_as_far_as_they_allow():
    y = np.repeat(np.arange(60) % 3, 4)
    groups = np.repeat(np.arange(60), 4)
    parts = split(y, {"val": 0.2, "test": 0.2}, groups=groups)
    for part, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
        counts = np.bincount(y[parts[part]], minlength=3)
        assert (abs(counts - share * 80) <= 4).all()


def test_few_groups_still_leave_no_requested_part_empty():
    parts = split([0, 0, 1, 1, 0, 1], {"val": 0.1, "test": 0.1}, groups=list("aabbcc"))
    assert [len(at) for at in parts.values()] == [2, 2, 2]


def test_fractions_that_sum_to_one_need_no_train():
    parts = split(np.arange(100) % 10, {s: 0.2 for s in "abcde"})
    assert list(parts) == list("abcde")
    assert {len(at) for at in parts.values()} == {20}


@pytest.mark.parametrize("wish", [{"test": -0.1}, {"test": 1.1}, {"val": 0.6, "test": 0.6}, {"train": 0.5}])
def test_refuses_impossible_fractions(wish):
    with pytest.raises(BadInput, match="fractions"):
        split([0, 1], wish)


def test_refuses_groups_of_another_length():
    with pytest.raises(BadInput, match="2 labels but 1 groups"):
        split([0, 1], {"test": 0.5}, groups=["a"])
