"""Judge predictions: all metrics of a model at every site and pooled, with bootstrap intervals."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.evaluation.bootstrap import Draws, replicates_for
from fednorms.evaluation.calibration import BINS, bin_of, calibration_error, reliability
from fednorms.evaluation.intervals import Interval, interval, share_interval
from fednorms.evaluation.judgement import ClassJudgement, Judgement, OperatingPoint, SiteJudgement
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.ranking import point_ranks, replicate_ranks
from fednorms.evaluation.threshold import Threshold

_RANKED = 20_000_000  # replicates x images x classes that are ranked
_LEAST_RANKED = 50
_CHUNK = 4_000_000  # replicates x images in memory at a time
_FEW_IMAGES = 30
_ERRORS = ("brier", "ece", "cross_entropy")


def judge_predictions(
    predictions: Mapping[str, Predictions],
    classes: Sequence[str],
    *,
    mode: str = "global",
    statistics: str = "global",
    split: str = "test",
    metric: str = "accuracy",
    threshold: Threshold | None = None,
    notes: Sequence[str] = (),
) -> Judgement:
    """Judge a model by what it predicted at each site.

    Intervals come from 1000 bootstrap replicates, which draw each site's images with replacement, or its patients
    where they are known. AUROC and AUPRC get fewer if there are many images and classes. `threshold` is the operating
    point of a binary model.

    >>> said = Predictions(np.array([0, 1, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]))
    >>> judgement = judge_predictions({"clinic": said}, ["benign", "malignant"])
    >>> judgement.pooled.confusion, judgement.worst_class, round(judgement.pooled.balanced_accuracy.value, 3)
    ([[1, 0], [1, 2]], 'malignant', 0.833)
    """
    _check(predictions, classes)
    whole = _pooled(predictions)
    sites = {name: _Site(p, len(classes), threshold) for name, p in predictions.items()}
    pooled = _Site(whole, len(classes), threshold) if len(sites) > 1 else next(iter(sites.values()))
    _replicate(sites, pooled, {name: Draws(len(p), p.groups, name, len(p)) for name, p in predictions.items()})
    made = {name: site.judgement(classes) for name, site in sites.items()}
    accuracies = np.stack([site.replicates()["accuracy"] for site in sites.values()])
    mean = _mean_of([m.accuracy for m in made.values()], accuracies.mean(0))
    said = [*notes, *_notes(made)]
    return Judgement(mode, statistics, split, list(classes), made, pooled.judgement(classes), mean, metric, said)


def accuracy_of(predictions: Mapping[str, Predictions]) -> Interval:
    """The accuracy over all images, with the interval that `judge_predictions` gives it, in less time."""
    n = sum(len(p) for p in predictions.values())
    replicates, right, units = replicates_for(n), 0, 0
    drawn_right, drawn_all = np.zeros(replicates), np.zeros(replicates)
    for site, p in predictions.items():
        hit, draws = p.probabilities.argmax(1) == p.labels, Draws(len(p), p.groups, site, len(p))
        drawn = [draws.next(count) for count in _chunks(replicates, n)]
        right += int(hit.sum())
        drawn_right += np.concatenate([d @ hit for d in drawn])
        drawn_all += np.concatenate([d.sum(1) for d in drawn])
        units += draws.units
    return share_interval(right / n, drawn_right / drawn_all, units)


def _chunks(replicates: int, images: int) -> list[int]:
    """How many replicates are drawn at a time."""
    rows = max(1, _CHUNK // images)
    return [min(rows, replicates - start) for start in range(0, replicates, rows)]


def _check(predictions: Mapping[str, Predictions], classes: Sequence[str]) -> None:
    if not predictions:
        raise BadInput("There are no predictions to judge.")
    for site, p in predictions.items():
        if not len(p):
            raise BadInput(f'Site "{site}" has no images to judge.')
        if p.classes != len(classes):
            raise BadInput(f'Site "{site}" has probabilities of {p.classes} classes, expected {len(classes)}.')


def _pooled(predictions: Mapping[str, Predictions]) -> Predictions:
    """The images of all sites; a patient is that of one site."""
    parts = list(predictions.values())
    groups = None
    if any(p.groups is not None for p in parts):
        groups = [
            f"{site}\x1f{group}"
            for site, p in predictions.items()
            for group in (range(len(p)) if p.groups is None else p.groups)
        ]
    probabilities = np.concatenate([p.probabilities for p in parts])
    return Predictions(np.concatenate([p.labels for p in parts]), probabilities, groups)


def _notes(sites: Mapping[str, SiteJudgement]) -> list[str]:
    few = [f'"{name}" ({_units(s)})' for name, s in sites.items() if (s.groups or s.n) < _FEW_IMAGES]
    missing = {c: [n for n, s in sites.items() if not s.classes[c].n] for c in next(iter(sites.values())).classes}
    what = "patients" if any(s.groups is not None for s in sites.values()) else "images"
    lines = [f"Too few {what} to judge single sites: {_some(few)}."] if few else []
    for name, where in missing.items():
        if len(where) == len(sites):
            lines.append(f'No site has images of class "{name}", so nothing is known about it.')
        elif where:
            lines.append(f'No images of class "{name}" at {_some([_quoted(w) for w in where])}.')
    return lines


def _units(site: SiteJudgement) -> str:
    images = counted(site.n, "image")
    return images if site.groups is None else f"{images} of {counted(site.groups, 'patient')}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _replicate(sites: Mapping[str, _Site], pooled: _Site, draws: Mapping[str, Draws]) -> None:
    """Draw images of each site, and give every site and the pool the sums and ranks of each replicate.

    The pool's replicates are those of the sites together: a site keeps its number of images or patients.
    """
    n = pooled.n
    replicates = replicates_for(n)
    ranked = int(np.clip(_RANKED // (n * pooled.classes), _LEAST_RANKED, replicates))
    done = 0
    for count in _chunks(replicates, n):
        drawn = {name: draw.next(count) for name, draw in draws.items()}
        to_rank = max(0, min(count, ranked - done))
        done += count
        for name, site in sites.items():
            site.add(drawn[name], to_rank)
        if len(sites) > 1:
            pooled.add(np.concatenate(list(drawn.values()), axis=1), to_rank)


@dataclass(frozen=True)
class _Columns:
    """Where each sum is, in the sums over images that all rates and errors are made of."""

    classes: int

    def cut(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """By class (correct, there, predicted), of the errors, by bin, and by class at the threshold."""
        by_class, errors, by_bin, at_threshold = np.split(
            sums, np.cumsum([3 * self.classes, 2, 3 * BINS]).tolist(), axis=-1
        )
        triples = [part.reshape(*part.shape[:-1], 3, -1) for part in (by_class, by_bin, at_threshold)]
        return triples[0], errors, triples[1], triples[2]


class _Site:
    """The images of one site, and their bootstrap replicates."""

    def __init__(self, p: Predictions, classes: int, threshold: Threshold | None) -> None:
        self.p, self.classes, self.threshold, self.n = p, classes, threshold, len(p)
        probabilities = p.probabilities.astype(np.float64)
        confidence, self.predicted = probabilities.max(1), probabilities.argmax(1)
        right = self.predicted == p.labels
        one_hot = np.eye(classes)[p.labels]
        squared = ((probabilities - one_hot) ** 2).sum(1) / (2 if classes == 2 else 1)
        least = np.finfo(p.probabilities.dtype).tiny
        surprise = -np.log(np.maximum(probabilities[np.arange(self.n), p.labels], least))
        in_bin = np.eye(BINS)[bin_of(confidence)]
        calibration = [in_bin, in_bin * confidence[:, None], in_bin * right[:, None]]
        said = [] if threshold is None else _by_class(p.labels, threshold.predicted(probabilities), 2)
        errors = np.stack([squared, surprise], axis=1)
        self.features = np.concatenate(
            [*_by_class(p.labels, self.predicted, classes), errors, *calibration, *said], axis=1
        )
        self.sums: list[np.ndarray] = []
        self.auroc: list[np.ndarray] = []
        self.auprc: list[np.ndarray] = []

    def add(self, drawn: np.ndarray, to_rank: int) -> None:
        """Add replicates; ranks are computed for the first ones only."""
        self.sums.append(drawn @ self.features)
        if to_rank:
            auroc, auprc = replicate_ranks(self.p.labels, self.p.probabilities, drawn[:to_rank])
            self.auroc.append(auroc)
            self.auprc.append(auprc)

    def replicates(self) -> dict[str, np.ndarray]:
        """The numbers over all classes, of every replicate."""
        return self._overall(np.concatenate(self.sums))

    def _overall(self, sums: np.ndarray) -> dict[str, np.ndarray]:
        by_class, errors, by_bin, _ = _Columns(self.classes).cut(sums)
        rates = _rates(by_class)
        n = by_class[..., 1, :].sum(-1)
        return {
            "accuracy": by_class[..., 0, :].sum(-1) / n,
            "balanced_accuracy": _mean(rates["recall"]),
            "f1": _mean(np.where(by_class[..., 1, :] > 0, rates["f1"], np.nan)),
            "brier": errors[..., 0] / n,
            "cross_entropy": errors[..., 1] / n,
            "ece": calibration_error(by_bin[..., 0, :], by_bin[..., 1, :], by_bin[..., 2, :]),
        }

    def judgement(self, classes: Sequence[str]) -> SiteJudgement:
        """The metrics with their intervals."""
        point, drawn = self.features.sum(0), np.concatenate(self.sums)
        by_class, _, by_bin, at_threshold = _Columns(self.classes).cut(point)
        drawn_by_class, _, _, drawn_at_threshold = _Columns(self.classes).cut(drawn)
        judged = self._classes(classes, by_class, drawn_by_class)
        overall = {
            k: (float(v), w) for (k, v), w in zip(self._overall(point).items(), self.replicates().values(), strict=True)
        }
        means = {
            name: _mean_of([getattr(c, name) for c in judged.values() if c.n], reps)
            for name, reps in (
                ("recall", overall["balanced_accuracy"][1]),
                ("f1", overall["f1"][1]),
                ("auroc", _mean(np.concatenate(self.auroc))),
                ("auprc", _mean(np.concatenate(self.auprc))),
            )
        }
        units = self._units(np.ones(self.n, bool))
        return SiteJudgement(
            n=self.n,
            groups=None if self.p.groups is None else units,
            confusion=_confusion(self.p.labels, self.predicted, self.classes),
            accuracy=share_interval(*overall["accuracy"], units),
            balanced_accuracy=means["recall"],
            f1=means["f1"],
            auroc=means["auroc"],
            auprc=means["auprc"],
            **{name: interval(*overall[name]) if units > 1 else _alone(overall[name][0]) for name in _ERRORS},
            bins=reliability(*by_bin),
            classes=judged,
            operating_point=self._at_threshold(classes, at_threshold, drawn_at_threshold),
        )

    def _classes(self, classes: Sequence[str], sums: np.ndarray, drawn: np.ndarray) -> dict[str, ClassJudgement]:
        rates, replicates = _rates(sums), _rates(drawn)
        auroc, auprc = point_ranks(self.p.labels, self.p.probabilities)
        auroc_drawn, auprc_drawn = np.concatenate(self.auroc), np.concatenate(self.auprc)
        found = {}
        for c, name in enumerate(classes):
            there, said = self.p.labels == c, self.predicted == c
            units = {"recall": there, "specificity": ~there, "precision": said, "f1": there | said}
            numbers = {
                k: share_interval(float(rates[k][c]), replicates[k][:, c], self._units(rows))
                for k, rows in units.items()
            }
            fewer = min(self._units(there), self._units(~there))
            found[name] = ClassJudgement(
                int(there.sum()),
                **numbers,
                auroc=share_interval(float(auroc[c]), auroc_drawn[:, c], fewer),
                auprc=share_interval(float(auprc[c]), auprc_drawn[:, c], fewer),
            )
        return found

    def _at_threshold(self, classes: Sequence[str], sums: np.ndarray, drawn: np.ndarray) -> OperatingPoint | None:
        if self.threshold is None:
            return None
        t, yes, no = self.threshold, self.threshold.positive, 1 - self.threshold.positive
        rates, replicates = _rates(sums), _rates(drawn)
        predicted = t.predicted(self.p.probabilities.astype(np.float64))
        is_yes, says_yes = self.p.labels == yes, predicted == yes

        def number(name: str, c: int, rows: np.ndarray) -> Interval:
            return share_interval(float(rates[name][c]), replicates[name][:, c], self._units(rows))

        right, drawn_right = sums[0].sum(), drawn[:, 0].sum(-1) / drawn[:, 1].sum(-1)
        return OperatingPoint(
            positive=classes[yes],
            threshold=t.value,
            rule=t.rule,
            chosen_on=t.chosen_on,
            confusion=_confusion(self.p.labels, predicted, 2),
            accuracy=share_interval(float(right / self.n), drawn_right, self._units(np.ones(self.n, bool))),
            sensitivity=number("recall", yes, is_yes),
            specificity=number("recall", no, ~is_yes),
            precision=number("precision", yes, says_yes),
            negative_predictive_value=number("precision", no, ~says_yes),
        )

    def _units(self, rows: np.ndarray) -> int:
        """How many of these images are independent: patients, where they are known."""
        return int(rows.sum()) if self.p.groups is None else len(np.unique(np.asarray(self.p.groups)[rows]))


def _by_class(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[np.ndarray]:
    """For each image and class: whether it is correct, there, and predicted."""
    there, said = np.eye(classes)[labels], np.eye(classes)[predicted]
    return [there * said, there, said]


def _confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[list[int]]:
    from sklearn.metrics import confusion_matrix

    if classes == 1:  # scikit-learn warns of a single label
        return [[len(labels)]]
    found: list[list[int]] = confusion_matrix(labels, predicted, labels=range(classes)).tolist()
    return found


def _rates(by_class: np.ndarray) -> dict[str, np.ndarray]:
    """Rates of each class from sums (..., 3, classes) of images that are correct, there, and predicted."""
    true, there, said = by_class[..., 0, :], by_class[..., 1, :], by_class[..., 2, :]
    others = there.sum(-1, keepdims=True) - there
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "recall": true / there,
            "specificity": (others - (said - true)) / others,
            "precision": true / said,
            "f1": 2 * true / (there + said),
        }


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis of what is defined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is defined: NaN
        return np.nanmean(values, axis=-1)


def _alone(value: float) -> Interval:
    """An error of one image or patient: nothing tells how it varies."""
    return Interval(value, np.nan, np.nan)


def _mean_of(numbers: Sequence[Interval], replicates: np.ndarray) -> Interval:
    """The interval of a mean over classes or sites; where replicates do not vary, the mean of their intervals."""
    known = [x for x in numbers if x.defined]
    if not known:
        return Interval.undefined()
    found = interval(float(np.mean([x.value for x in known])), replicates)
    if not found.certain and any(x.value not in (0.0, 1.0) for x in known):
        return found
    return Interval(found.value, float(np.mean([x.low for x in known])), float(np.mean([x.high for x in known])))
