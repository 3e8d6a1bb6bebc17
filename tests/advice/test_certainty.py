"""How sure an answer is: the paired bootstrap, and the verdicts that follow."""

from dataclasses import replace

import numpy as np
import pytest

from fednorms.advice.advice import Advice, Finalist
from fednorms.advice.arms import Question, propose
from fednorms.advice.budget import Budget
from fednorms.advice.certainty import Difference, difference
from fednorms.advice.tournament import Played, Rung, Rungs, Trial
from fednorms.evaluation.predictions import Predictions
from fednorms.runs.recipe import Recipe


def predictions(right, labels):
    said = np.where(right, labels, 1 - labels)
    return Predictions(labels, np.eye(2)[said])


def several(shares, seeds=3, images=400):
    """Answers with a share of correct ones per site, of seeds that differ."""
    out = []
    for seed in range(seeds):
        r = np.random.default_rng(seed)
        labels = np.arange(images) % 2
        out.append({site: predictions(r.random(images) < share, labels) for site, share in shares.items()})
    return out


def test_the_same_answers_do_not_differ():
    answers = several({"x": 0.8, "y": 0.6})
    found = difference(answers, answers)
    assert (found.mean, found.low, found.high, found.probability) == (0, 0, 0, 0.5)
    assert not found.clear


def test_the_mean_and_the_width_match_theory():
    ours, theirs = several({"x": 0.9}, seeds=1, images=2000), several({"x": 0.7}, seeds=1, images=2000)
    found = difference(ours, theirs)
    d = (ours[0]["x"].probabilities.argmax(1) == ours[0]["x"].labels).astype(float)
    d -= theirs[0]["x"].probabilities.argmax(1) == theirs[0]["x"].labels
    assert found.mean == pytest.approx(100 * d.mean())
    assert found.high - found.low == pytest.approx(100 * 2 * 1.96 * d.std() / np.sqrt(len(d)), rel=0.15)
    assert found.clear
    assert found.probability > 0.999


def test_sites_count_equally_and_classes_if_balanced():
    labels = np.array([0] * 90 + [1] * 10)
    ours = [{"x": predictions(labels == 0, labels), "y": predictions(np.ones(100, bool), labels)}]
    theirs = [{"x": predictions(labels == 1, labels), "y": predictions(np.ones(100, bool), labels)}]
    assert difference(ours, theirs).mean == pytest.approx(100 * (0.9 - 0.1) / 2)
    assert difference(ours, theirs, balanced=True).mean == pytest.approx(0)


def test_seeds_that_disagree_widen_the_interval():
    labels = np.arange(400) % 2
    good, bad = predictions(np.arange(400) < 360, labels), predictions(np.arange(400) < 200, labels)
    same = difference([{"x": good}, {"x": good}], [{"x": bad}, {"x": bad}])
    mixed = difference([{"x": good}, {"x": bad}], [{"x": bad}, {"x": good}])
    assert same.clear
    assert mixed.low < 0 < mixed.high


def advice(names, gap):
    question = Question("cnn-small", classes=10, shape=(3, 8, 8), sites=2, rounds=4)
    arms = propose(question, {}, methods=list(names)).arms
    found = [Finalist(Trial(n, n, {"lr": 0.1}), [0.9 - i / 50], 4, gap if i else None) for i, n in enumerate(names)]
    played = [Played(f.trial, 0, 4, f.mean, [(4, f.mean)], {"x": (9, 10)}) for f in found]
    rungs = [Rungs(Rung(4, 2, 1), played)]
    return Advice(Recipe(), question.facts(), [], arms, {}, rungs, found, Budget(10), planned=1)


CLEAR, UNCLEAR = Difference(2.0, 0.5, 3.5, 0.99, 10, 3), Difference(2.0, -0.5, 3.5, 0.8, 10, 3)


@pytest.mark.parametrize(
    ("names", "gap", "verdict", "said"),
    [
        (("fedbn", "fedavg"), CLEAR, "clear", "Take fedbn with lr 0.1"),
        (("fedbn", "fedavg"), UNCLEAR, "no difference", "show no difference to fedavg"),
        (("standalone", "fedavg"), CLEAR, "alone", "Each site alone does better"),
        (("standalone", "fedavg"), UNCLEAR, "no difference", "show no difference to fedavg"),
    ],
)
def test_verdicts(names, gap, verdict, said):
    found = advice(names, gap)
    assert found.verdict == verdict
    assert said in found.sentence
    assert said.split()[-1] in repr(found)


def test_the_cheaper_of_two_equals_is_named():
    assert "fedavg costs less" in advice(("scaffold", "fedavg"), UNCLEAR).sentence
    assert "fedavg also costs less" in advice(("fedavg", "scaffold"), UNCLEAR).sentence


def test_unfinished_advice_says_so():
    found = replace(advice(("fedbn", "fedavg"), CLEAR), planned=2)
    assert not found.finished
    assert "best so far" in found.sentence
