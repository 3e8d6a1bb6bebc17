"""The page on how well `advise` does is made of its results, and counts them correctly."""

import json
from statistics import fmean, stdev

import pytest

from docs import make_advise_page as maker
from fednorms.advice.priors import records

RESULTS = json.loads(maker.PAGE.with_suffix(".json").read_text())
SUITES = maker.stored()


def test_the_page_is_current():
    assert maker.page(SUITES) == maker.PAGE.read_text(encoding="utf-8"), "run: python docs/make_advise_page.py"


@pytest.mark.parametrize("question", maker.QUESTIONS)
def test_regrets_are_what_the_best_arm_gains(question):
    for federation in (f for results in SUITES.values() for f in results["federations"]):
        asked = federation[question]
        assert asked["always"][asked["winner"]] == min(asked["always"].values()) == 0
        assert asked["measures"] in asked["always"].values()


def test_the_goal_needs_both_conditions():
    assert "is met" in maker.verdict({"advise": [0.5], "always a": [3.0], "always b": [2.0]})
    assert "is missed" in maker.verdict({"advise": [0.5], "always a": [1.2]})
    assert "is missed" in maker.verdict({"advise": [1.5], "always a": [9.0]})


def test_priors_are_those_of_all_results():
    known = {(r["data"], r["name"], r["model"]): r for r in records()}
    federations = [f for results in SUITES.values() for f in results["federations"]]
    assert len(known) == len(records()) == len(federations)
    for f in federations:
        record = known[f["data"], f["name"], f["model"]]
        assert record["lost"] == f["any"]["always"]
        assert record["measures"] == f["measures"]
    assert fmean(len(r["lost"]) for r in known.values()) > 5


def test_no_planned_federation_is_left_out():
    for name, planned in {"held-out": 18, "real": 16}.items():
        assert len(SUITES[name]["federations"]) == SUITES[name]["planned"] == planned


def test_held_out_federations_are_not_those_that_shaped_the_search():
    shaped = {(f["data"], f["name"]) for f in RESULTS["federations"]}
    assert not shaped & {(f["data"], f["name"]) for f in SUITES["held-out"]["federations"]}


def test_the_interval_of_a_mean_is_that_of_its_deviation():
    values = [0.0, 1.0, 5.0, 2.0, 2.0, 8.0, 3.0, 0.5] * 20
    low, high = maker.interval(values)
    assert (high - low) / 2 == pytest.approx(1.96 * stdev(values) / len(values) ** 0.5, rel=0.1)
    assert low < fmean(values) < high
