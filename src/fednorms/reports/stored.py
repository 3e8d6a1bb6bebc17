"""What a report reads of runs and comparisons: results, facts of the federation, judgements of predictions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from fednorms.core.errors import BadInput
from fednorms.data.facts import Facts
from fednorms.evaluation.intervals import Interval, wilson
from fednorms.evaluation.judge import judge_predictions
from fednorms.evaluation.judgement import Judgement
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import Scores
from fednorms.runs.cells import Outcome
from fednorms.runs.comparison import Comparison
from fednorms.runs.differences import Answers
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.run_names import folders_of
from fednorms.runs.store import predictions
from fednorms.runs.store.directory import RunDirectory


@dataclass(frozen=True)
class RunRecord:
    """A run as its directory, or a result in memory, describes it."""

    result: Result
    facts: Facts | None
    finished: bool = True

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read a run's directory; neither data nor model are opened.

        >>> RunRecord.read("nowhere")
        Traceback (most recent call last):
        fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
        """
        directory = RunDirectory(path)
        recipe = Recipe.from_toml(directory.read_recipe(), str(directory.recipe))
        history, summary, facts = directory.metrics(), directory.summary(), directory.read_facts()
        if not history:
            raise BadInput(f"Run {path} has no finished round yet. Continue it with `{directory.resume_command}`.")
        ended = summary or {}
        tested = [name.rpartition("/")[0] for row in history for name in row["scores"]]
        domains = facts.domain_of if facts else {}
        known = {site: site for row in history for values in row["scores"].values() for site in values["sites"]}
        result = Result(
            recipe.method,
            recipe,
            ended.get("headline") or (tested[0] if tested else ""),
            history,
            best=_best(ended),
            notes=list(ended.get("notes", [])),
            path=Path(path),
            privacy=ended.get("privacy"),
            domain_of=known | domains,
        )
        return cls(result, facts, summary is not None)

    @classmethod
    def of(cls, result: Result) -> RunRecord:
        """The run of a result in memory; one that was stored is read from its directory."""
        if result.path is not None and RunDirectory(result.path).recipe.exists():
            return cls.read(result.path)
        session = result._session
        return cls(result, None if session is None else session.facts)

    @cached_property
    def tests(self) -> dict[str, Scores]:
        """The newest scores of each mode, the headline's first: on test images, or without any on validation images."""
        newest = {name: row for row in self.result.history for name in row["scores"]}
        names = [name for name in newest if name.endswith("/test")] or [n for n in newest if n.endswith("/val")]
        names.sort(key=lambda name: not name.startswith(f"{self.result.headline}/"))
        rows = {name: newest[name]["scores"][name] for name in names}
        return {name.rpartition("/")[0]: Scores.from_dict(row, self.result.domain_of) for name, row in rows.items()}

    @property
    def headline(self) -> Scores | None:
        """The scores by which the method is judged; None if nothing was tested."""
        return next(iter(self.tests.values()), None)

    @cached_property
    def predictions(self) -> dict[str, dict[str, Predictions]]:
        """What was predicted at each site in the last round, by mode; only modes whose predictions were stored."""
        if self.result.path is None:
            return {}
        directory, at = RunDirectory(self.result.path), self.result.rounds
        found: dict[str, dict[str, Predictions]] = {}
        for label, scores in self.tests.items():
            said = predictions.read(directory, at, label, scores.split)
            if said is not None:  # the file's order varies, and sums depend on it
                found[label] = {site: said[site] for site in scores.sites if site in said}
        return found

    @cached_property
    def judgements(self) -> dict[str, Judgement]:
        """The judgements of stored predictions, by mode ("personal/own")."""
        facts = self.facts
        if facts is None:
            return {}
        return {
            label: judge_predictions(
                said,
                facts.classes,
                mode=self.tests[label].mode,
                statistics=self.tests[label].statistics,
                split=self.tests[label].split,
                metric=self.result.recipe.metric,
            )
            for label, said in self.predictions.items()
        }

    @property
    def judgement(self) -> Judgement | None:
        """The judgement of the headline mode, if predictions were stored."""
        return self.judgements.get(self.result.headline)

    @property
    def score(self) -> Literal["accuracy", "balanced_accuracy"]:
        """The score by which the run is judged."""
        return "balanced_accuracy" if self.result.recipe.metric == "balanced_accuracy" else "accuracy"

    @property
    def metric(self) -> str:
        """That score in words."""
        return self.score.replace("_", " ")

    def worst_of(self, scores: Scores) -> str:
        """The site with the lowest accuracy, or balanced accuracy if the run is judged by that."""
        return min(scores.sites, key=lambda site: getattr(scores.sites[site], self.score))

    def at(self, label: str, site: str) -> Interval:
        """The score of a mode at a site, in the run's metric, with its interval if that is known."""
        judged = self.judgements.get(label)
        if judged is not None and site in judged.sites:
            found: Interval = getattr(judged.sites[site], self.score)
            return found
        scores = self.tests[label]
        if self.score == "accuracy":
            return site_interval(scores, site)
        return Interval(scores.sites[site].balanced_accuracy, math.nan, math.nan)

    @property
    def mean(self) -> Interval:
        """The headline mean accuracy over sites, with its interval; balanced accuracy has none."""
        assert self.headline is not None
        if self.score == "balanced_accuracy":
            return Interval(self.headline.balanced_accuracy, math.nan, math.nan)
        return self.judgement.mean if self.judgement is not None else mean_interval(self.headline)


def _best(ended: dict[str, object]) -> dict[str, object] | None:
    found = ended.get("best_validation")
    return found if isinstance(found, dict) else None


def site_interval(scores: Scores, site: str) -> Interval:
    """The accuracy at a site with Wilson's interval of its number of images."""
    return wilson(scores.sites[site].accuracy, scores.sites[site].samples)


def mean_interval(scores: Scores) -> Interval:
    """The mean accuracy over sites; the interval takes the sites' images as independent."""
    each = [site_interval(scores, site) for site in scores.sites]
    half = math.sqrt(sum(((i.high - i.low) / 2) ** 2 for i in each)) / len(each)
    return Interval(scores.mean, max(0.0, scores.mean - half), min(1.0, scores.mean + half))


@dataclass(frozen=True)
class ComparisonRecord:
    """A comparison, and what is known of its runs, by method as the user wrote it."""

    comparison: Comparison
    runs: dict[str, list[RunRecord]]

    @classmethod
    def read(cls, folder: Path) -> ComparisonRecord:
        """Read a comparison's folder: comparison.json and the directories of its runs."""
        file = folder / "comparison.json"
        try:
            stored = json.loads(file.read_bytes())
            methods, seeds = dict(stored["methods"]), [int(seed) for seed in stored["seeds"]]
            failed = {(row["method"], int(s)): str(why) for row in stored["rows"] for s, why in row["failed"].items()}
            about, notes = dict(stored["about"]), list(stored.get("notes", ()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadInput(f"{file} is not readable ({error}). Run the comparison again to write it.") from error
        outcomes: list[Outcome] = []
        runs: dict[str, list[RunRecord]] = {label: [] for label in methods}
        for label, name in zip(methods, folders_of(methods), strict=True):
            for seed in seeds:
                place = folder / f"{name}-{seed}"
                if why := failed.get((label, seed)) or ("" if place.is_dir() else f"its run is not at {place}"):
                    outcomes.append(Outcome(label, seed, math.nan, error=why))
                    continue
                run = RunRecord.read(place)
                said = {
                    mode: {site: Answers.of(p) for site, p in sites.items()} for mode, sites in run.predictions.items()
                }
                outcomes.append(replace(Outcome.of(label, run.result), answers=said))
                runs[label].append(run)
        metric = next((run.result.recipe.metric for found in runs.values() for run in found), "accuracy")
        return cls(Comparison(methods, seeds, outcomes, about, folder, notes=notes, metric=metric), runs)

    @classmethod
    def of(cls, comparison: Comparison) -> ComparisonRecord:
        """A comparison in memory; the runs of a stored one are read from their directories."""
        stored = comparison.path is not None and (comparison.path / "comparison.json").exists()
        if not stored or comparison.path is None:
            return cls(comparison, {label: [] for label in comparison.methods})
        return replace(cls.read(comparison.path), comparison=comparison)
