"""Differences between compared methods: a paired bootstrap over test images and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from fednorms.core.noise import seed_of
from fednorms.evaluation.bootstrap import Draws, replicates_for
from fednorms.evaluation.intervals import Interval, interval
from fednorms.evaluation.predictions import Predictions

MEAN, BALANCED, ACCURACY = "mean", "balanced", "accuracy"
OVERALL = (MEAN, BALANCED, ACCURACY)  # columns over all sites
FEWEST = 6  # units that differ: with five, even if all favor the same method, a sign test has p = 2 / 2**5 > 0.05


@dataclass(frozen=True, eq=False)
class Answers:
    """The true and predicted class of each test image of a site, and its patient, where known."""

    labels: np.ndarray
    predicted: np.ndarray
    groups: np.ndarray | None = None

    @classmethod
    def of(cls, said: Predictions) -> Answers:
        """What is needed of predictions to compare accuracies."""
        whose = None if said.groups is None else np.unique(said.groups, return_inverse=True)[1].astype(np.int32)
        return cls(said.labels.astype(np.int32), said.probabilities.argmax(1).astype(np.int32), whose)


Tested = Mapping[str, Answers]  # by site
Sums = dict[str, np.ndarray]


@dataclass(frozen=True)
class Column:
    """A column of the table: its value, its bootstrap replicates, and what each unit of a site adds to the value.

    A unit is a patient, or an image where patients are not known.
    """

    value: float
    replicates: np.ndarray
    added: Mapping[str, np.ndarray]  # by site

    @property
    def units(self) -> int:
        """How many units were tested."""
        return sum(map(len, self.added.values()))


@dataclass(frozen=True)
class Replicated:
    """A column of the table for each seed."""

    by_seed: Mapping[int, Column]


@dataclass
class PairedBootstrap:
    """Replicates of accuracies; all methods and seeds share the draws of test images, so differences are paired."""

    domain_of: Mapping[str, str]
    _draws: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    _replicates: int = 0

    def columns(self, tested: Tested, *, balanced: bool = False) -> dict[str, Column]:
        """Accuracy per domain and the mean over domains, each with replicates.

        With `balanced`, the domains have balanced accuracy, the mean over their sites; `balanced` is the mean over all
        sites, and `accuracy` the mean accuracy over domains.
        """
        self._replicates = self._replicates or replicates_for(sum(len(a.labels) for a in tested.values()))
        right: dict[str, Any] = {}
        total: dict[str, Any] = {}
        hits: Sums = {}
        for site, answers in sorted(tested.items()):
            drawn, domain = self._drawn(site, answers), self.domain_of[site]
            hit = answers.predicted == answers.labels
            right[domain] = right.get(domain, 0) + _with_point(drawn, hit)
            total[domain] = total.get(domain, 0) + _with_point(drawn, np.ones(len(hit)))
            hits[site] = _per_unit(answers, hit)
        whole = {domain: right[domain] / total[domain] for domain in right}
        added = {d: {s: h / total[d][0] for s, h in hits.items() if self.domain_of[s] == d} for d in whole}
        mean = np.mean(list(whole.values()), axis=0)
        of_mean = {s: each / len(whole) for of_sites in added.values() for s, each in of_sites.items()}
        if balanced:
            whole, added = self._balanced(tested)
        last = ACCURACY if balanced else MEAN
        whole[last], added[last] = mean, of_mean
        return {column: Column(float(both[0]), both[1:], added[column]) for column, both in whole.items()}

    def _balanced(self, tested: Tested) -> tuple[Sums, dict[str, Sums]]:
        """Balanced accuracy of every domain and over all sites with its replicates, and what each unit adds."""
        recalls: Sums = {}
        shares: Sums = {}
        sites_of: dict[str, list[str]] = {}
        for site, answers in sorted(tested.items()):
            hit = answers.predicted == answers.labels
            recalls[site] = _mean_recall(self._drawn(site, answers), answers.labels, hit)
            shares[site] = _per_unit(answers, hit / _class_sizes(answers.labels))
            sites_of.setdefault(self.domain_of[site], []).append(site)
        sites_of[BALANCED] = list(recalls)
        whole = {column: np.mean([recalls[s] for s in sites], axis=0) for column, sites in sites_of.items()}
        return whole, {column: {s: shares[s] / len(sites) for s in sites} for column, sites in sites_of.items()}

    def _drawn(self, site: str, answers: Answers) -> np.ndarray:
        key = site, len(answers.labels)
        if key not in self._draws:
            whose = None if answers.groups is None else answers.groups.astype(str)
            self._draws[key] = Draws(len(answers.labels), whose, *key).next(self._replicates)
        return self._draws[key]


def difference(a: Replicated, b: Replicated) -> Interval:
    """The difference a - b of two columns, with its interval over test images and the seeds that both have.

    A replicate draws images and seeds with replacement, the same for both. Means over few drawn seeds vary too little,
    by the factor sqrt((S - 1) / S), so their deviation is divided by it. With one seed only images are drawn.

    If fewer than six units make the difference, the interval is widened to hold 0: their replicates vary too little.
    """
    pairs = [(column, b.by_seed[seed]) for seed, column in a.by_seed.items() if seed in b.by_seed]
    if not pairs:
        return Interval.undefined()
    point = float(np.mean([x.value - y.value for x, y in pairs]))
    each = np.stack([x.replicates - y.replicates for x, y in pairs])  # seeds x replicates
    count, replicates = each.shape
    middle = each.mean(0)
    if count > 1:
        chosen = np.random.default_rng(seed_of("bootstrap of seeds", count)).integers(0, count, (count, replicates))
        drawn = np.take_along_axis(each, chosen, axis=0).mean(0)
        middle = middle + (drawn - middle) * sqrt(count / (count - 1))
    gap = interval(point, middle)
    if _differing(pairs) < FEWEST - 1e-9:
        return Interval(point, min(gap.low, 0.0), max(gap.high, 0.0))
    return gap


def _differing(pairs: Sequence[tuple[Column, Column]]) -> float:
    """How many units make a difference: their number if all count alike, fewer if a few of them count most."""
    parts = []
    for site in dict.fromkeys(s for pair in pairs for column in pair for s in column.added):
        gaps = [x.added.get(site, np.zeros(1)) - y.added.get(site, np.zeros(1)) for x, y in pairs]
        whole = np.zeros(max(map(len, gaps)))  # seeds may have other test images
        for gap in gaps:
            whole[: len(gap)] += gap
        parts.append(np.abs(whole))
    size = np.concatenate(parts)
    return float(size.sum() ** 2 / squares) if (squares := (size**2).sum()) > 0 else 0.0


def within_noise(gap: Interval) -> bool:
    """Whether a difference may be none: its interval holds 0.

    >>> within_noise(Interval(0.02, -0.01, 0.05)), within_noise(Interval(0.02, 0.01, 0.03))
    (True, False)
    """
    return gap.defined and gap.low <= 0 <= gap.high


def _with_point(drawn: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The sum over images, then that of every replicate."""
    weights = values.astype(np.float64)
    return np.append(weights.sum(), drawn @ weights)


def _per_unit(answers: Answers, values: np.ndarray) -> np.ndarray:
    """Sums of the images' values over the units."""
    return values.astype(float) if answers.groups is None else np.bincount(answers.groups, values)


def _class_sizes(labels: np.ndarray) -> np.ndarray:
    """For each image, the number of its class's images times the number of classes."""
    _, which, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return sizes[which] * len(sizes)


def _mean_recall(drawn: np.ndarray, labels: np.ndarray, hit: np.ndarray) -> np.ndarray:
    """The mean recall over classes, then that of every replicate; a class that was not drawn does not count."""
    each = np.full((len(np.unique(labels)), len(drawn) + 1), np.nan)
    for row, c in enumerate(np.unique(labels)):
        there = labels == c
        n = _with_point(drawn, there)
        np.divide(_with_point(drawn, there & hit), n, out=each[row], where=n > 0)
    return np.nanmean(each, axis=0)
