"""The scores of exactly the model that is handed out, in exactly its mode; or the answer that it was never scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fednorms.core.counted import counted
from fednorms.core.errors import RunFailed
from fednorms.evaluation.intervals import Interval, wilson
from fednorms.evaluation.judge import accuracy_of, judge_predictions
from fednorms.evaluation.judgement import Judgement
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import Scores
from fednorms.runs.store import predictions
from fednorms.runs.use.choose import Chosen
from fednorms.runs.use.open import OpenRun


@dataclass(frozen=True)
class Scored:
    """Test scores of a chosen model at one site (its own) or at all sites.

    `scores` are those that the run recorded, `predictions` what it kept. Without either, `never` says why the model was
    never scored, and how to score it.
    """

    mode: Mode
    site: str | None
    round: int
    scores: Scores | None = None
    predictions: Mapping[str, Predictions] | None = None
    classes: Sequence[str] = ()
    metric: str = "accuracy"
    never: str = ""

    @cached_property
    def judgement(self) -> Judgement | None:
        """All metrics with intervals; None if the run kept no predictions."""
        if self.predictions is None:
            return None
        mode = self.mode
        return judge_predictions(
            self.predictions, self.classes, mode=mode.model, statistics=mode.statistics, metric=self.metric
        )

    @cached_property
    def accuracy(self) -> Interval:
        """Accuracy over all images; without kept predictions, with Wilson's interval."""
        if self.predictions is not None:
            return accuracy_of(self.predictions)
        if self.scores is not None:
            return wilson(self.scores.pooled, self.images)
        return Interval.undefined()

    @property
    def images(self) -> int:
        """How many test images the scores are from."""
        if self.predictions is not None:
            return sum(map(len, self.predictions.values()))
        return sum(s.samples for s in self.scores.sites.values()) if self.scores is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "mode": str(self.mode),
            "site": self.site,
            "round": self.round,
            "never_scored": self.never or None,
            "accuracy": None if self.never else self.accuracy.to_dict(),
            "images": self.images,
            "scores": None if self.scores is None else self.scores.to_dict(),
            "judgement": None if self.judgement is None else self.judgement.to_dict(),
        }

    def __str__(self) -> str:
        told = {"mode": str(self.mode), "site": self.site, "round": self.round, "never_scored": self.never}
        return in_words(told if self.never else told | {"accuracy": self.accuracy.to_dict(), "images": self.images})


def in_words(told: Mapping[str, Any]) -> str:
    """The scores in a sentence, from the plain values of `Scored.to_dict`, which an exported model keeps."""
    if told["never_scored"]:
        return f"Never scored: {told['never_scored']}"
    where = f'at "{told["site"]}"' if told["site"] is not None else "over all sites"
    return (
        f'Accuracy {Interval.from_dict(told["accuracy"])} % {where} ("{told["mode"]}", round {told["round"]}, '
        f"{counted(told['images'], 'test image')})."
    )


def scored(opened: OpenRun, chosen: Chosen, *, exported: bool = False) -> Scored:
    """Find the scores of a chosen model; `exported` is one that predicts with its classifier outside of fednorms.

    They come from the run's metrics and kept predictions, so no data are needed.
    """
    mode, site, t = chosen.mode, chosen.site, opened.state.round
    if why := _other_than_tested(opened, chosen, exported):
        return Scored(mode, site, t, never=why)
    scores = _recorded(opened, f"{mode}/test")
    found = _kept(opened, mode, site)
    if site is not None and scores is not None:
        here = {name: s for name, s in scores.sites.items() if name == site}
        scores = Scores(scores.mode, scores.statistics, scores.split, here, scores.domain_of) if here else None
    if scores is None and found is None:
        where = f' at site "{site}"' if site is not None else ""
        how = f"`fednorms evaluate {opened.directory.path} --modes {mode}" + _which(opened) + "` does"
        return Scored(mode, site, t, never=f'the run has not tested "{mode}"{where} in round {t}; {how}.')
    metric = opened.recipe.metric if opened.recipe.metric != "auto" else "accuracy"
    return Scored(mode, site, t, scores, found, opened.facts.classes, metric)


def _which(opened: OpenRun) -> str:
    return " --which best" if opened.which == "best" else ""


def _other_than_tested(opened: OpenRun, chosen: Chosen, exported: bool) -> str:
    """Why no test of the run is one of this model; empty if there may be one."""
    if chosen.measured_here:
        return "its input is normalized with statistics of the images it is given, and the run's tests used others."
    if exported and opened.task.method.evaluation().predict:
        return f'"{opened.task.method}" is tested with prototypes, but this model predicts with its classifier.'
    return ""


def _recorded(opened: OpenRun, name: str) -> Scores | None:
    for row in opened.directory.metrics():
        if row["round"] == opened.state.round and name in row["scores"]:
            return Scores.from_dict(row["scores"][name], opened.facts.domain_of)
    return None


def _kept(opened: OpenRun, mode: Mode, site: str | None) -> dict[str, Predictions] | None:
    try:
        found = predictions.read(opened.directory, opened.state.round, str(mode))
    except RunFailed:  # damaged: `fednorms verify` says so
        return None
    return {name: p for name, p in (found or {}).items() if site is None or name == site} or None
