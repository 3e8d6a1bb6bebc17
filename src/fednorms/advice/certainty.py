"""How sure a choice is: a paired bootstrap over validation images and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from fednorms.data import Federation
from fednorms.evaluation.predictions import Predictions
from fednorms.runs.differences import BALANCED, MEAN, Answers, PairedBootstrap, Replicated
from fednorms.runs.differences import difference as paired_difference
from fednorms.runs.identity import Custom
from fednorms.runs.use.open import open_run

Said = Mapping[str, Predictions]
"""What a model says about the validation images of each site."""


@dataclass(frozen=True)
class Difference:
    """Points by which one method is better than another: the mean, a 95 % interval, and how probably it is above 0."""

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


def difference(ours: Sequence[Said], theirs: Sequence[Said], *, balanced: bool = False) -> Difference:
    """Compare two methods, seed by seed, on the same images: mean over sites of accuracy, or of recall over classes.

    Each replicate draws seeds, and images (patients, where they are known) within each site, with replacement. Both
    methods are judged on the same draws.
    """
    draws = PairedBootstrap({site: site for site in ours[0]})
    gap = paired_difference(_replicated(draws, ours, balanced), _replicated(draws, theirs, balanced))
    width = (gap.high - gap.low) / (2 * NormalDist().inv_cdf(0.975))
    above = NormalDist(gap.value, width).cdf(0) if width > 0 else float(gap.value < 0) + (gap.value == 0) / 2
    images = sum(len(p) for p in ours[0].values())
    return Difference(100 * gap.value, 100 * gap.low, 100 * gap.high, 1 - above, images, len(ours))


def _replicated(draws: PairedBootstrap, seeds: Sequence[Said], balanced: bool) -> Replicated:
    column = BALANCED if balanced else MEAN
    found = [draws.columns({k: Answers.of(p) for k, p in s.items()}, balanced=balanced)[column] for s in seeds]
    return Replicated(dict(enumerate(found)))


def answers(path: Path, federation: Federation, custom: Custom) -> Said:
    """What a stored run says about validation images, in the mode that its method is judged by."""
    opened = open_run(path, federation=federation, model=custom.model, loss=custom.loss)
    session = opened.session
    return session.engine.predict(opened.state, session.headline, opened.cohort, "val")
