"""Every ordered pair of methods trains, or is refused when composed, with an error that names the incompatible parts.

A sample, chosen by a hash of the names, in `make test`; all pairs in `make test-all`. See `tests/support/pairs.py`.
"""

import math
import re

import pytest
import torch

from fednorms.core.errors import BadInput
from tests.support.pairs import NEUTRAL, Trial, fitting, known, ordered, parts_of, some

ALL = ordered()
SAMPLE = some(ALL, 200)
WITH_NEUTRAL = [(a, b) for a in known() for b in NEUTRAL if a != b and b in known()]
NEUTRAL_SAMPLE = some(WITH_NEUTRAL, 60)


def test_the_table_of_neutral_settings_names_methods():
    assert set(NEUTRAL) <= set(known())


def check(a, b):
    """Train and test the pair, or check that the refusal names both parts."""
    text = f"{fitting(a)} + {fitting(b)}"
    try:
        trial = Trial.compose(text)
    except BadInput as error:
        said = str(error).replace(f'Method "{text}"', "")  # this quotes both without saying which is wrong
        for name in (a, b):
            assert not parts_of(name) or any(re.search(rf"\b{p}\b", said) for p in parts_of(name)), said
        return
    outcome = trial.train()
    strange = [name for name, tensor in outcome.tensors().items() if not torch.isfinite(tensor).all()]
    assert not strange
    losses = trial.test(outcome)
    assert losses
    assert all(map(math.isfinite, losses))


def check_neutral(a, b):
    """`a` with a neutral `b`, before or after it, is `a`."""
    try:
        alone = Trial.compose(fitting(a)).train().tensors()
        both = [Trial.compose(text) for text in (f"{fitting(a)} + {NEUTRAL[b]}", f"{NEUTRAL[b]} + {fitting(a)}")]
    except BadInput:  # checked above
        return
    for trial in both:
        found = trial.train().tensors()
        assert not [name for name, t in alone.items() if name not in found or not torch.equal(t, found[name])]


@pytest.mark.parametrize(("a", "b"), SAMPLE)
def test_a_pair_trains_or_is_refused_at_once_by_name(a, b):
    check(a, b)


@pytest.mark.parametrize(("a", "b"), NEUTRAL_SAMPLE)
def test_a_neutral_part_changes_nothing(a, b):
    check_neutral(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("a", known())
def test_all_pairs(a):
    for first, b in ALL:
        if first == a:
            check(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("b", NEUTRAL)
def test_all_neutral_parts(b):
    for a, other in WITH_NEUTRAL:
        if other == b:
            check_neutral(a, b)
