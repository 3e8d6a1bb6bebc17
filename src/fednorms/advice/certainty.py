"""How sure a choice is: a paired bootstrap over validation images and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednorms.core.noise import seed_of
from fednorms.data import Federation
from fednorms.evaluation.bootstrap import Draws, replicates_for
from fednorms.evaluation.intervals import interval
from fednorms.evaluation.predictions import Predictions
from fednorms.runs.identity import Custom
from fednorms.runs.use.open import open_run

Answers = Mapping[str, Predictions]
"""What a model says about the validation images of each site."""


@dataclass(frozen=True)
class Difference:
    """Points by which one method is better than another: the mean, a 95 % interval, and how often it is above 0."""

    mean: float
    low: float
    high: float
    probability: float
    images: int
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, in points."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.mean:+.1f} points (95 % interval {self.low:+.1f} to {self.high:+.1f})"


def difference(ours: Sequence[Answers], theirs: Sequence[Answers], *, balanced: bool = False) -> Difference:
    """Compare two methods, seed by seed, on the same images: mean over sites of accuracy, or of recall over classes.

    Each replicate draws seeds, and images (patients, where they are known) within each site, with replacement. Both
    methods are judged on the same draws.
    """
    sites, seeds = list(ours[0]), len(ours)
    replicates = replicates_for(sum(len(p) for p in ours[0].values()))
    per_seed, point = np.zeros((replicates, seeds)), 0.0
    for site in sites:
        first = ours[0][site]
        apart = np.stack([_right(a[site]) - _right(b[site]) for a, b in zip(ours, theirs, strict=True)])
        drawn = Draws(len(first), first.groups, "difference", site).next(replicates)
        strata = [first.labels == c for c in np.unique(first.labels)] if balanced else [first.labels >= 0]
        with np.errstate(invalid="ignore"):  # a class that a replicate does not draw has no recall in it
            shares = [drawn[:, rows] @ apart[:, rows].T / drawn[:, rows].sum(1, keepdims=True) for rows in strata]
        per_seed += 100 * np.nanmean(shares, axis=0) / len(sites)
        point += 100 * float(np.mean([apart[:, rows].mean() for rows in strata])) / len(sites)
    chosen = np.random.default_rng(seed_of("seeds of a difference", seeds)).integers(0, seeds, (replicates, seeds))
    values = np.take_along_axis(per_seed, chosen, axis=1).mean(1)
    found = interval(point, values)
    above = float((values > 0).mean() + (values == 0).mean() / 2)
    return Difference(point, found.low, found.high, above, sum(len(p) for p in ours[0].values()), seeds)


def _right(predictions: Predictions) -> np.ndarray:
    return (predictions.probabilities.argmax(1) == predictions.labels).astype(float)


def answers(path: Path, federation: Federation, custom: Custom) -> Answers:
    """What a stored run says about validation images, in the mode that its method is judged by."""
    opened = open_run(path, federation=federation, model=custom.model, loss=custom.loss)
    session = opened.session
    return session.engine.predict(opened.state, session.headline, opened.cohort, "val")
