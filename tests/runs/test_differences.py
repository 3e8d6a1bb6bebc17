"""Differences between methods: paired over images and seeds, against a plain loop and on constructed cases."""

from dataclasses import replace

import numpy as np
import pytest

import fednorms as fn
from fednorms.evaluation.bootstrap import Draws
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.runs.cells import Outcome
from fednorms.runs.comparison import ALIKE, Comparison
from fednorms.runs.differences import Answers, Column, PairedBootstrap, Replicated, difference, within_noise


def answers(right, seed=0, classes=4):
    labels = np.random.default_rng(seed).integers(0, classes, len(right))
    return Answers(labels, np.where(right, labels, (labels + 1) % classes))


def rights(n, share, seed):
    return np.random.default_rng(seed).random(n) < share


def outcome(label, seed, right, mode="global"):
    given = {site: answers(r) for site, r in right.items()}
    sites = {s: SiteScore(float(r.mean()), float(r.mean()), 1.0, len(r), []) for s, r in right.items()}
    scores = Scores(mode, "global", "test", sites, {s: s for s in sites})
    name = f"{mode}/global"
    return Outcome(label, seed, 0.1, name, last={f"{name}/test": scores}, answers={name: given})


def comparison(shares, seeds=3, n=300, noise=0.0):
    """Methods that are right on the same images as far as possible; `noise` changes the share from seed to seed."""
    rng = np.random.default_rng(5)
    outcomes = []
    for label, share in shares.items():
        for seed in range(seeds):
            moved = share + noise * rng.normal()
            outcomes.append(outcome(label, seed, {s: rights(n, moved, seed=k) for k, s in enumerate("ab")}))
    return Comparison({label: label for label in shares}, list(range(seeds)), outcomes)


def test_columns_are_those_of_a_loop():
    tested = {"a": answers(rights(40, 0.6, 1)), "b": answers(rights(30, 0.4, 2)), "c": answers(rights(20, 0.9, 3))}
    bootstrap = PairedBootstrap({"a": "x", "b": "x", "c": "y"})
    plain, found = bootstrap.columns(tested), bootstrap.columns(tested, balanced=True)
    drawn = {s: Draws(len(t.labels), None, s, len(t.labels)).next(1000) for s, t in tested.items()}
    for b in (0, 17, 999):
        rows = {s: np.repeat(np.arange(len(t.labels)), drawn[s][b].astype(int)) for s, t in tested.items()}
        hit = {s: (t.predicted == t.labels)[rows[s]] for s, t in tested.items()}
        x, y = np.concatenate([hit["a"], hit["b"]]).mean(), hit["c"].mean()
        assert plain["x"].replicates[b] == pytest.approx(x)
        assert plain["mean"].replicates[b] == found["accuracy"].replicates[b] == pytest.approx((x + y) / 2)
        recalls = []
        for s, t in tested.items():
            y_drawn = t.labels[rows[s]]
            recalls.append(np.mean([hit[s][y_drawn == c].mean() for c in np.unique(y_drawn)]))
        assert found["balanced"].replicates[b] == pytest.approx(np.mean(recalls))
        assert found["x"].replicates[b] == pytest.approx(np.mean(recalls[:2]))
        assert found["y"].replicates[b] == pytest.approx(recalls[2])
    hits = [(tested[s].predicted == tested[s].labels) for s in "ab"]
    assert plain["x"].value == pytest.approx(np.concatenate(hits).mean())
    for column in (*plain.values(), *found.values()):  # what units add is the value
        assert sum(added.sum() for added in column.added.values()) == pytest.approx(column.value)


def test_identical_models_do_not_differ():
    found = comparison({"one": 0.7, "two": 0.7})
    assert found.difference("one", "two").to_dict() == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_a_clearly_better_model_differs_and_a_slightly_better_one_does_not():
    found = comparison({"best": 0.80, "close": 0.795, "far": 0.6}, noise=0.01)
    assert within_noise(found.difference("best", "close"))
    far = found.difference("best", "far")
    assert not within_noise(far)
    assert far.low > 0.1
    assert found.difference("far", "best").value == pytest.approx(-far.value)
    best = found.best
    rows = {row[0]: row for row in found.cells()[1:]}
    assert rows[best][-1].endswith(" *")
    other = {"best": "close", "close": "best"}[best]
    assert rows[other][-1].endswith(" =")
    assert not rows["far"][-1].endswith(("=", "*"))
    assert ALIKE in repr(found)
    told = {row["method"]: row["to_best"]["mean"] for row in found.to_dict()["rows"] if row["method"] != best}
    assert told["far"]["within_noise"] is False
    assert told[other]["within_noise"] is True
    assert told["far"]["low"] > 0


def test_the_table_counts_the_differences_that_it_tests():
    found = comparison({"best": 0.80, "close": 0.795, "far": 0.6}, noise=0.01)
    tested = sum(len(row["to_best"]) for row in found.to_dict()["rows"])
    assert f"\n  {tested} differences were tested, without correction" in repr(found)
    two = Comparison({"a": "a", "b": "b"}, [0], [outcome(x, 0, {"s": rights(40, 0.7, 1)}) for x in "ab"])
    assert sum(len(row["to_best"]) for row in two.to_dict()["rows"]) > 1  # the site and the mean


def test_pairing_narrows_the_interval():
    a, b = rights(400, 0.75, 1), rights(400, 0.70, 1)  # right on nested sets of images
    other = rights(400, 0.70, 2)
    widths = []
    for second in (b, other):
        found = Comparison({"a": "a", "b": "b"}, [0], [outcome("a", 0, {"s": a}), outcome("b", 0, {"s": second})])
        gap = found.difference("a", "b")
        widths.append(gap.high - gap.low)
    assert widths[0] < 0.7 * widths[1]


def test_seeds_widen_the_interval_as_a_standard_error_does():
    rng = np.random.default_rng(0)
    values = rng.normal(0.1, 0.05, 5)
    still, zero = (
        Replicated({seed: Column(v, np.full(2000, v), {"a": np.full(20, v / 20)}) for seed, v in enumerate(each)})
        for each in (values, np.zeros(5))
    )
    gap = difference(still, zero)
    error = values.std(ddof=1) / np.sqrt(5)
    assert gap.value == pytest.approx(values.mean())
    assert (gap.high - gap.low) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_the_interval_covers_a_true_difference():
    covered = 0
    for trial in range(60):
        a = {"s": rights(200, 0.70, 1000 + trial)}
        b = {"s": rights(200, 0.60, 5000 + trial)}
        gap = Comparison({"a": "a", "b": "b"}, [0], [outcome("a", 0, a), outcome("b", 0, b)]).difference("a", "b")
        covered += gap.low <= 0.10 <= gap.high
    assert covered >= 50  # 57 are expected


def sign_test(differing):
    """The smallest two-sided p of an exact sign test: all units that differ favor the same method."""
    return 2 / 2**differing


@pytest.mark.parametrize("differing", range(1, 9))
@pytest.mark.parametrize("grouped", [False, True])
def test_a_difference_is_claimed_only_if_a_sign_test_of_its_units_could(differing, grouped):
    each = 3 if grouped else 1
    labels = np.arange(differing * each) % 2
    whose = np.repeat(np.arange(differing), each) if grouped else None
    right, wrong = Answers(labels, labels, whose), Answers(labels, 1 - labels, whose)
    draws = PairedBootstrap({"s": "s"})
    a, b = (Replicated({k: draws.columns({"s": x})["mean"] for k in range(2)}) for x in (right, wrong))
    gap = difference(a, b)
    assert within_noise(gap) == (sign_test(differing) > 0.05)
    assert gap.value == 1


def test_many_images_with_small_parts_do_not_outvote_two_that_decide():
    many, two = rights(400, 0.5, 1), np.ones(2, bool)
    draws = PairedBootstrap({"a": "a", "b": "b"})
    first, second = ({"a": answers(m), "b": answers(t)} for m, t in ((many, two), (rights(400, 0.55, 1), ~two)))
    gap = difference(*(Replicated({0: draws.columns(x)["mean"]}) for x in (first, second)))
    assert gap.value > 0.4
    assert within_noise(gap)


def test_a_comparison_says_what_is_too_little_to_tell():
    few, one = Answers(np.array([0, 1]), np.array([0, 1])), Answers(np.zeros(9, int), np.zeros(9, int))
    found = [outcome(x, 0, {"few": np.ones(2, bool), "one": np.ones(9, bool)}) for x in "ab"]
    found = [replace(o, answers={o.headline: {"few": few, "one": one}}) for o in found]
    said = Comparison({"a": "a", "b": "b"}, [0], found).remarks()
    assert any("too few test images" in line and '"few" (2)' in line and '"one"' not in line for line in said)
    assert any("one class only" in line and '"one"' in line and '"few"' not in line for line in said)


def test_unknown_rows_and_columns_are_refused():
    found = comparison({"one": 0.7, "two": 0.6}, seeds=1)
    with pytest.raises(fn.BadInput, match='No row "thre" in this comparison'):
        found.difference("thre", "two")
    with pytest.raises(fn.BadInput, match='no "c" of one to compare'):
        found.difference("one", "two", "c")
    bare = Comparison({"one": "one"}, [0], [replace(o, answers={}) for o in found.outcomes[:1]])
    with pytest.raises(fn.BadInput, match="kept no test predictions"):
        bare.difference("one", "one")
    assert " =" not in repr(bare)


def test_a_comparison_of_runs_is_tested_with_and_without_a_folder(tmp_path):
    options = {"rounds": 1, "seeds": 2, "recipe": fn.Recipe(data={"size": 8, "hold_out": ["poster"]})}
    free = fn.compare(["fedavg", "fedbn", "standalone"], **options)
    stored = fn.compare(["fedavg", "fedbn", "standalone"], out=tmp_path / "c", **options)
    for found in (free, stored):
        for row in found.rows:
            replicated = found._replicated[row.label, row.mode]
            for column, entry in row.entries.items():
                found_mean = np.mean([c.value for c in replicated[column].by_seed.values()])
                assert found_mean == pytest.approx(entry.mean), (row.label, column)
    assert free.difference("fedavg", "fedbn") == stored.difference("fedavg", "fedbn")
    assert free.cells()[0][-2] == "poster (unseen/global)"
    assert "to_best" in (tmp_path / "c" / "comparison.json").read_text()
    private = fn.compare(
        ["fedavg", "fedbn"], rounds=1, seeds=1, recipe=fn.Recipe(keep_predictions=False, data={"size": 8})
    )
    assert private.to_best == {}
