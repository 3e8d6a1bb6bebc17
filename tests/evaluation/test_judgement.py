"""Metrics of a model against scikit-learn, torchmetrics and plain loops; intervals against simulated coverage."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from fednorms.core.errors import BadInput
from fednorms.evaluation.bootstrap import Draws
from fednorms.evaluation.intervals import Interval, interval, wilson
from fednorms.evaluation.judge import judge_predictions
from fednorms.evaluation.judgement import OVERALL, PER_CLASS, Judgement
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.ranking import replicate_ranks
from fednorms.evaluation.threshold import choose_threshold


def predictions(n, classes, skill=1.0, seed=0, groups=None, ties=False):
    """Random labels and probabilities that are better the higher `skill` is."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes))
    logits[np.arange(n), labels] += skill
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if ties:
        p = np.round(p, 1) + 0.01
        p /= p.sum(1, keepdims=True)
    return Predictions(labels, p, groups)


def names(classes):
    return [f"class {c}" for c in range(classes)]


@pytest.mark.parametrize(("classes", "ties"), [(2, False), (5, False), (5, True)])
def test_metrics_are_those_of_scikit_learn(classes, ties):
    said = predictions(300, classes, ties=ties)
    y, p = said.labels, said.probabilities
    found = judge_predictions({"site": said}, names(classes)).pooled
    answers = p.argmax(1)
    assert found.confusion == metrics.confusion_matrix(y, answers).tolist()
    expected = {
        "accuracy": metrics.accuracy_score(y, answers),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, answers),
        "f1": metrics.f1_score(y, answers, average="macro"),
        "auroc": np.mean([metrics.roc_auc_score(y == c, p[:, c]) for c in range(classes)]),
        "auprc": np.mean([metrics.average_precision_score(y == c, p[:, c]) for c in range(classes)]),
        "brier": metrics.brier_score_loss(y, p, labels=range(classes)),
        "cross_entropy": metrics.log_loss(y, p),
    }
    for name, value in expected.items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-9), name
    precision, recall, f1, support = metrics.precision_recall_fscore_support(y, answers)
    for c, judged in enumerate(found.classes.values()):
        assert judged.n == support[c]
        assert judged.recall.value == pytest.approx(recall[c])
        assert judged.precision.value == pytest.approx(precision[c])
        assert judged.f1.value == pytest.approx(f1[c])
        assert judged.specificity.value == pytest.approx(metrics.recall_score(y != c, answers != c))
        assert judged.auroc.value == pytest.approx(metrics.roc_auc_score(y == c, p[:, c]))


@pytest.mark.parametrize("classes", [2, 5])
def test_calibration_error_is_that_of_torchmetrics(classes):
    from torchmetrics.functional.classification import multiclass_calibration_error

    said = predictions(500, classes, skill=2.0)
    found = judge_predictions({"site": said}, names(classes)).pooled
    p, y = torch.tensor(said.probabilities), torch.tensor(said.labels)
    expected = multiclass_calibration_error(p, y, num_classes=classes, n_bins=15, norm="l1")
    assert found.ece.value == pytest.approx(float(expected), rel=1e-5)
    assert sum(b.n for b in found.bins) == 500
    by_bins = sum(b.n / 500 * abs(b.accuracy - b.confidence) for b in found.bins if b.n)
    assert by_bins == pytest.approx(found.ece.value)


def test_a_probability_of_one_is_in_the_last_bin():
    said = Predictions(np.array([0, 1]), np.array([[1.0, 0.0], [0.0, 1.0]]))
    found = judge_predictions({"site": said}, names(2)).pooled
    assert found.bins[-1].n == 2
    assert found.ece.value == 0.0


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_of_replicates_are_those_of_the_drawn_images(ties):
    said = predictions(60, 3, ties=ties)
    drawn = Draws(60, None, "test").next(20)
    auroc, auprc = replicate_ranks(said.labels, said.probabilities, drawn)
    for b in range(20):
        rows = np.repeat(np.arange(60), drawn[b].astype(int))
        for c in range(3):
            y, score = said.labels[rows] == c, said.probabilities[rows, c]
            assert auroc[b, c] == pytest.approx(metrics.roc_auc_score(y, score), rel=1e-5)
            assert auprc[b, c] == pytest.approx(metrics.average_precision_score(y, score), rel=1e-5)


def test_replicates_without_an_image_of_a_class_are_undefined():
    auroc, auprc = replicate_ranks(np.array([0, 1]), np.array([[0.6, 0.4], [0.3, 0.7]]), np.array([[2.0, 0], [0, 2]]))
    assert np.isnan(auroc).all()
    assert np.isnan(auprc).all()


def test_draws_follow_from_names_and_not_from_chunks():
    whole = Draws(50, None, "site", 50).next(10)
    draws = Draws(50, None, "site", 50)
    assert (np.concatenate([draws.next(4), draws.next(6)]) == whole).all()
    assert (whole.sum(1) == 50).all()
    assert (Draws(50, None, "other", 50).next(10) != whole).any()


def test_images_of_a_patient_are_drawn_together():
    groups = np.array(["a", "b", "a", "c", "b", "a"])
    drawn = Draws(6, groups, "site").next(50)
    for group in "abc":
        assert (drawn[:, groups == group] == drawn[:, groups == group][:, :1]).all()
    assert (drawn[:, [0, 1, 3]].sum(1) == 3).all()  # as many patients as there are


def test_intervals_cover_the_truth():
    covered = {"accuracy": 0, "auroc": 0, "brier": 0}
    big = judge_predictions({"site": predictions(30_000, 3, seed=99)}, names(3)).pooled
    for seed in range(60):
        found = judge_predictions({f"site {seed}": predictions(120, 3, seed=seed)}, names(3)).pooled
        for name in covered:
            number = getattr(found, name)
            covered[name] += number.low <= getattr(big, name).value <= number.high
    for name, count in covered.items():  # 57 are expected; fewer than 50 of 60 would have probability 0.0005
        assert count >= 50, name


def test_intervals_by_patient_are_wider_where_patients_agree():
    one = predictions(60, 2)
    repeated = Predictions(np.repeat(one.labels, 10), np.repeat(one.probabilities, 10, 0))
    patients = Predictions(repeated.labels, repeated.probabilities, np.repeat(np.arange(60), 10).astype(str))
    by_image, by_patient = (judge_predictions({"s": p}, names(2)).pooled for p in (repeated, patients))
    assert by_patient.groups == 60
    width = [x.accuracy.high - x.accuracy.low for x in (by_image, by_patient)]
    assert width[1] > 2 * width[0]  # the square root of 10 is expected
    assert by_patient.accuracy.value == by_image.accuracy.value


def test_five_correct_images_are_no_proof():
    said = Predictions(np.array([0, 1, 0, 1, 0]), np.eye(2)[[0, 1, 0, 1, 0]])
    found = judge_predictions({"tiny": said}, names(2))
    assert found.pooled.accuracy == wilson(1.0, 5)
    assert found.pooled.accuracy.low < 0.6
    assert found.pooled.auroc.low < 0.6
    assert any("Too few images" in note and "5 images" in note for note in found.notes)


def test_five_correct_images_are_no_proof_in_any_metric():
    """An interval without width claims certainty: no mean over classes may have one where every class has some."""
    answers = Predictions(np.array([0, 0, 1, 1, 1]), np.eye(2, dtype=np.float32)[[0, 0, 1, 1, 1]])
    found = judge_predictions({"clinic": answers}, ["benign", "malignant"]).pooled
    for name in ("accuracy", "balanced_accuracy", "f1", "auroc", "auprc"):
        assert getattr(found, name).value == 1
        assert getattr(found, name).low < 0.6


def test_many_images_of_few_patients_are_few():
    r = np.random.default_rng(0)
    p = r.dirichlet([1, 1], 120).astype(np.float32)
    groups = [f"patient {i // 30}" for i in range(120)]
    known = judge_predictions({"clinic": Predictions(r.integers(0, 2, 120), p, groups)}, ["a", "b"])
    assert any("Too few patients" in note and '"clinic" (120 images of 4 patients)' in note for note in known.notes)
    unknown = judge_predictions({"clinic": Predictions(r.integers(0, 2, 120), p)}, ["a", "b"])
    assert not any("Too few" in note for note in unknown.notes)


@pytest.mark.parametrize("patients", [1, 4])
def test_no_interval_is_a_point_where_patients_are_all_alike(patients):
    # Each patient has three images of each class, and one of each three is wrong: replicates cannot vary.
    labels = np.tile([0, 0, 0, 1, 1, 1], patients)
    answers = np.tile([0, 0, 1, 1, 1, 0], patients)
    said = Predictions(labels, np.eye(2)[answers] * 0.8 + 0.1, np.repeat(np.arange(patients), 6))
    found = judge_predictions({"site": said, "other": said}, names(2))
    site = found.sites["site"]
    shares = [site.accuracy, site.balanced_accuracy, site.f1, *(c.recall for c in site.classes.values())]
    for one in shares:
        assert one.value == pytest.approx(2 / 3)
        assert one.low == pytest.approx(wilson(2 / 3, patients).low)
        assert one.high == pytest.approx(wilson(2 / 3, patients).high)
    assert found.mean.low < found.mean.value < found.mean.high
    assert math.isnan(site.brier.low) == (patients == 1)


def test_wilson_is_that_of_the_textbook():
    found = wilson(0.9, 100)  # Wilson 1927: roots of (p - x)^2 = z^2 x (1 - x) / n
    for edge in (found.low, found.high):
        assert (0.9 - edge) ** 2 == pytest.approx(1.959963984540054**2 * edge * (1 - edge) / 100)


def test_a_missing_class_is_undefined_and_named():
    some = predictions(50, 3)
    there = some.labels != 2
    first = Predictions(some.labels[there], some.probabilities[there])
    found = judge_predictions({"a": first, "b": some}, names(3))
    assert not found.sites["a"].classes["class 2"].recall.defined
    assert found.sites["a"].classes["class 2"].specificity.defined
    present = found.sites["a"].classes
    assert found.sites["a"].balanced_accuracy.value == pytest.approx(
        np.mean([present["class 0"].recall.value, present["class 1"].recall.value])
    )
    assert 'No images of class "class 2" at "a".' in found.notes


def test_one_class_only_has_no_auroc():
    said = Predictions(np.zeros(8, int), np.full((8, 2), 0.5))
    found = judge_predictions({"a": said}, names(2))
    assert not found.pooled.auroc.defined
    assert found.pooled.accuracy.value == 1.0
    assert not found.pooled.classes["class 0"].specificity.defined
    json.dumps(found.to_dict(), allow_nan=False)
    assert "AUROC" in repr(found)


def test_pooled_is_over_all_images_and_mean_over_sites():
    a, b = predictions(90, 3, skill=3.0), predictions(30, 3, skill=0.1, seed=1)
    found = judge_predictions({"a": a, "b": b}, names(3))
    sites = found.sites
    assert found.mean.value == pytest.approx((sites["a"].accuracy.value + sites["b"].accuracy.value) / 2)
    right = sum(s.accuracy.value * s.n for s in sites.values())
    assert found.pooled.accuracy.value == pytest.approx(right / 120)
    y, p = np.concatenate([a.labels, b.labels]), np.concatenate([a.probabilities, b.probabilities])
    assert found.pooled.classes["class 1"].auroc.value == pytest.approx(metrics.roc_auc_score(y == 1, p[:, 1]))
    assert found.worst_site == "b"
    recalls = {name: c.recall.value for name, c in found.pooled.classes.items()}
    assert recalls[found.worst_class] == min(recalls.values())
    values = [s.accuracy.value for s in sites.values()]
    assert found.spread == {"std": pytest.approx(np.std(values)), "lowest": min(values), "highest": max(values)}


def test_a_judgement_repeats_and_survives_json():
    sites = {"a": predictions(40, 3), "b": predictions(40, 3, seed=1, groups=[str(i // 2) for i in range(40)])}
    found = judge_predictions(sites, names(3), mode="personal", statistics="own")
    again = judge_predictions(sites, names(3), mode="personal", statistics="own")
    assert again.to_dict() == found.to_dict()
    read = Judgement.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert read.to_dict() == found.to_dict()
    assert repr(read) == repr(found)


def test_a_judgement_is_shown_in_80_columns():
    sites = {"a hospital with a long name": predictions(1234, 15), "b": predictions(40, 15, seed=1)}
    found = judge_predictions(sites, [f"a diagnosis with many words, number {c}" for c in range(15)])
    text = repr(found)
    assert max(map(len, text.splitlines())) <= 80
    assert found.worst_class in text
    assert "<table>" in found._repr_html_()
    assert "| site |" in found.to_markdown()
    frame = found.to_frame()
    assert len(frame) == 3 * 16
    assert {*OVERALL, *PER_CLASS} <= set(frame.columns)
    assert frame["accuracy_low"].iloc[0] == found.sites["a hospital with a long name"].accuracy.low


def test_interval_of_few_replicates_is_normal_and_contains_the_value():
    values = np.random.default_rng(0).normal(0.5, 0.1, 100)
    found = interval(0.5, values)
    assert found.high - 0.5 == pytest.approx(1.96 * values.std(ddof=1), rel=1e-3)
    assert interval(0.9, np.full(300, 0.5)).high == 0.9
    assert math.isnan(interval(0.9, np.array([np.nan])).low)
    assert Interval.from_dict(Interval.undefined().to_dict()).defined is False


def test_youden_threshold_is_the_best_of_all():
    said = predictions(200, 2)
    found = choose_threshold(said.labels, said.probabilities)
    score, positive = said.probabilities[:, 1], said.labels == 1

    def youden(t):
        return (score[positive] >= t).mean() - (score[~positive] >= t).mean()

    assert youden(found.value) == pytest.approx(max(youden(t) for t in score))
    assert found.value not in score


@pytest.mark.parametrize("wanted", [0.5, 0.95, 1.0])
def test_threshold_reaches_the_wanted_sensitivity_and_no_higher_one_does(wanted):
    said = predictions(200, 2)
    found = choose_threshold(said.labels, said.probabilities, sensitivity=wanted)
    score = said.probabilities[said.labels == 1, 1]
    assert (score >= found.value).mean() >= wanted
    higher = min(s for s in said.probabilities[:, 1] if s > found.value)
    assert (score > higher).mean() < wanted


def test_operating_point_is_reported_on_other_images():
    val, test = predictions(200, 2), predictions(300, 2, seed=1)
    t = choose_threshold(val.labels, val.probabilities, sensitivity=0.95)
    point = judge_predictions({"a": test}, ["no", "yes"], threshold=t).pooled.operating_point
    says, positive = test.probabilities[:, 1] >= t.value, test.labels == 1
    assert point.positive == "yes"
    assert point.chosen_on == 200
    assert point.sensitivity.value == pytest.approx(metrics.recall_score(positive, says))
    assert point.specificity.value == pytest.approx(metrics.recall_score(~positive, ~says))
    assert point.precision.value == pytest.approx(metrics.precision_score(positive, says))
    assert point.negative_predictive_value.value == pytest.approx(metrics.precision_score(~positive, ~says))
    assert point.confusion == metrics.confusion_matrix(positive, says).tolist()
    assert point.accuracy.value == pytest.approx(metrics.accuracy_score(positive, says))


def test_bad_predictions_are_refused():
    with pytest.raises(BadInput, match="no predictions"):
        judge_predictions({}, ["a"])
    with pytest.raises(BadInput, match='"x" has no images'):
        judge_predictions({"x": Predictions(np.zeros(0), np.zeros((0, 2)))}, names(2))
    with pytest.raises(BadInput, match="expected 3"):
        judge_predictions({"x": predictions(5, 2)}, names(3))
    with pytest.raises(BadInput, match="one label"):
        Predictions(np.zeros(3), np.zeros((2, 2)))
    with pytest.raises(BadInput, match="from 0 to 1"):
        Predictions(np.array([2]), np.array([[0.5, 0.5]]))
    with pytest.raises(BadInput, match="diverged"):
        Predictions(np.array([0]), np.array([[np.nan, 0.5]]))
    with pytest.raises(BadInput, match="two classes"):
        choose_threshold(np.array([0]), np.array([[0.2, 0.3, 0.5]]))
    with pytest.raises(BadInput, match="both classes"):
        choose_threshold(np.array([0]), np.array([[0.5, 0.5]]))
    with pytest.raises(BadInput, match="sensitivity"):
        choose_threshold(np.array([0, 1]), np.eye(2), sensitivity=95)
