"""Extreme texts (huge numbers, endless sums, deep nesting) give one short message, quickly."""

from __future__ import annotations

import pytest

from fednorms.core.errors import BadInput
from fednorms.core.sampling import Participation
from fednorms.methods.registry import method
from fednorms.runs.recipe import Recipe

NINES = "9" * 400
SHORT = 1200  # characters of a message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (f"rounds = {NINES}", "rounds must be an integer of at most 64 bits, got one of 1329 bits"),
        (f"seed = -{NINES}", "seed must be an integer of at most"),
        (f"class_weights = [1, {NINES}]", "class_weights must be an integer of at most"),
        (f"[training]\nlr = {NINES}", r"training\.lr must be an integer of at most"),
        (f"[data]\nsize = {NINES}", r"data\.size must be an integer of at most"),
        ("rounds = " + 5000 * "9", "not valid TOML"),
        ("[training]\nlr = 1e400", "finite"),
        ("x = " + 5000 * "[", "nested too deeply"),
        ("training = " + 3000 * "{a=" + "1" + 3000 * "}", "nested too deeply"),
        ("a" + 100_000 * ".a" + " = 1", "key of more than 64 parts"),
        ("[a" + 100_000 * " . 'a'" + "]", "key of more than 64 parts"),
        ("x = {a" + 100_000 * '."a"' + " = 1}", "key of more than 64 parts"),
        ("a" * 10**6, "not valid TOML"),
        ("-" * 10**6, "not valid TOML"),
        ("'a' " * 10**5, "not valid TOML"),
        ("a" + " " * 10**6, "not valid TOML"),
        ("#" * 2**21, "2,097,152 characters; at most 1,048,576"),
        ('participation = "fixed:1e400"', 'Cannot read participation "fixed:1e400"'),
        (f'participation = "fixed:{NINES}"', r"400 characters|406 characters"),
        (f'evaluate = ["global/batch:{5000 * "9"}"]', "Unknown evaluation mode"),
        ('method = "' + 1200 * "fedavg + " + 'fedavg"', "10,806 characters"),
    ],
)
def test_a_recipe_is_refused_in_few_words(toml, message):
    with pytest.raises(BadInput, match=message) as caught:
        Recipe.from_toml(toml)
    assert len(str(caught.value)) < SHORT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"fedprox(mu={NINES})", "mu must be a number"),
        (f"fedprox(mu=-{NINES})", "mu must be a number"),
        (f"gn(groups={NINES})", "groups must be an integer"),
        ("fedprox(mu=" + 3000 * "-" + "1)", "nested too deeply"),
        ("fedprox(mu=" + 500 * "(" + "1" + 500 * ")" + ")", "Cannot read the method"),
        (" + ".join(1200 * ["fedbn"]), "more than once|twice|two"),
        ("fedbn" + 5000 * "+", "Cannot read the method"),
        ("a" * 9999, "Unknown method"),
        (10**5 * "a.", "200,000 characters"),
    ],
)
def test_a_method_is_refused_in_few_words(text, message):
    with pytest.raises(BadInput, match=message) as caught:
        method(text)
    assert len(str(caught.value)) < SHORT


def test_a_long_sum_is_read():
    parts = [f"a{i}" for i in range(500)]
    with pytest.raises(BadInput, match='Unknown method "a0"'):
        method(" + ".join(parts))


@pytest.mark.parametrize("number", ["1e400", "inf", "nan", "1e19", "-1", NINES])
def test_participation_counts_clients(number):
    with pytest.raises(BadInput, match="Cannot read participation"):
        Participation.read(f"fixed:{number}")


def test_long_lists_and_large_numbers_that_make_sense_are_read():
    weights = ", ".join("1.5" for _ in range(5000))
    assert len(Recipe.from_toml(f"class_weights = [{weights}]").class_weights) == 5000
    assert Recipe.from_toml(f"seed = {2**63 - 1}").seed == 2**63 - 1
