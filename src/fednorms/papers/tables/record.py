"""What is stored of a finished run: its scores, its recipe, and where and when it was made."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch

from fednorms._version import __version__
from fednorms.core.errors import BadInput
from fednorms.data.facts import SiteFacts
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.methods.registry import method as read_method
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.tables.local_weights import named
from fednorms.runs.cells import Outcome, RoundSummary
from fednorms.runs.identity import own_parts
from fednorms.runs.recipe import Recipe

MOST_SITES = 20  # with more, only domains are stored
# Keys that decide where and how a run is made, and not its result.
_MACHINE = {"version", "device", "engine", "fingerprint", "threads", "workers", "checkpoint_every", "state_limit_mb"}
_MACHINE |= {"keep_checkpoints", "keep_predictions", "memory"}
_MACHINE |= {"data.root", "data.complete", "data.allow_pickle"}
# Keys whose "auto" was replaced by the data set's value when the run started.
_ADOPTED = {"data.augment", "loss", "class_weights", "metric"}
_MACHINE |= {"evaluate_every", "validate_every"}  # see `tested_alike`

Values = dict[str, Any]


@cache
def sources() -> str:
    """A digest of the library's own files, which tells states between two releases apart."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:10]


def made() -> Values:
    """Date and versions of the software."""
    return {
        "date": f"{datetime.now().astimezone():%Y-%m-%d}",
        "version": __version__,
        "sources": sources(),
        "torch": torch.__version__.partition("+")[0],
    }


def same_run(stored: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether a stored recipe means the same run, on any machine.

    >>> same_run(plain(Recipe(rounds=3, device="cuda:1")), Recipe(rounds=3))
    True
    >>> same_run(plain(Recipe(rounds=3)), Recipe(rounds=4)), same_run(plain(Recipe(weighting="uniform")), Recipe())
    (False, False)
    """
    try:
        then = Recipe.make(dict(stored))
    except BadInput:  # of a version with other keys
        return False
    code = own_parts(read_method(recipe.method))
    old, new = _essence(then), _essence(recipe.settled().model_copy(update={"own_parts": code}))
    return all(old.get(k) == new.get(k) or (k in _ADOPTED and new.get(k) == "auto") for k in {**old, **new})


def tested_alike(then: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether a run with a stored recipe was tested after the same rounds."""
    return (then["evaluate_every"], then.get("validate_every")) == (recipe.evaluate_every, recipe.validate_every)


def _essence(recipe: Recipe) -> Values:
    values = plain(recipe)
    values |= {f"data.{key}": value for key, value in values.pop("data").items()}
    return {key: value for key, value in values.items() if key not in _MACHINE}


def plain(recipe: Recipe) -> Values:
    """A recipe as plain values, without the folders of its data and weights."""
    values = recipe.to_dict()
    values["weights"] = named(recipe.weights)
    values["data"] = {k: v for k, v in values["data"].items() if k != "root"}
    return values


def record(
    outcome: Outcome, recipe: Recipe, sites: Mapping[str, SiteFacts], *, curve: bool, about: Mapping[str, Any]
) -> Values:
    """What is stored of a run on these sites; `about` gives table, setting, row, data and hardware."""
    rounds, headline = outcome.rounds, outcome.headline
    values: Values = {
        **about,
        "seed": recipe.seed,
        "status": outcome.status,
        **made(),
    }
    if outcome.error:
        values["error"] = error_of(outcome, recipe)
    else:
        values |= {
            "headline": headline,
            "rounds": rounds[-1].number,
            "last": _scores(outcome.last, "test", sites),
            "val": _scores(outcome.last, "val", sites).get(headline),
            "best": _best(outcome, sites),
            "bytes": round(median(r.bytes for r in rounds)),
            "seconds": {
                "total": round(sum(r.seconds for r in rounds), 3),
                "round": round(median(r.seconds for r in rounds), 5),
            },
        }
        if curve:
            values["curve"] = _curves(rounds)
    return values | {"recipe": plain(recipe)}


def _best(outcome: Outcome, sites: Mapping[str, SiteFacts]) -> Values | None:
    if outcome.best is None:
        return None
    scores = _scores(outcome.at_best, "test", sites)
    return {**outcome.best, "val": _short(outcome.best["val"]), "scores": scores}


def _scores(tested: Mapping[str, Scores], split: str, sites: Mapping[str, SiteFacts]) -> Values:
    return {scores.label: compact(scores, sites) for scores in tested.values() if scores.split == split}


def compact(scores: Scores, sites: Mapping[str, SiteFacts]) -> Values:
    """The scores of one mode over clients, per domain, and per site if there are few."""
    tested, split = scores.sites, scores.split
    every = {"accuracy": [s.accuracy for s in tested.values()]}
    every["balanced"] = [s.balanced_accuracy for s in tested.values()]
    clients: Values = {
        what: {"mean": _short(fmean(v)), "spread": _short(pstdev(v)), "worst": _short(min(v))}
        for what, v in every.items()
    }
    clients["accuracy"]["pooled"] = _short(scores.pooled)
    groups: dict[str, dict[str, SiteScore]] = {}
    for name, site in tested.items():
        groups.setdefault(scores.domain_of[name], {})[name] = site
    out: Values = {
        "clients": {"count": len(tested), **clients},
        "domains": {domain: _pooled(group, split, sites) for domain, group in groups.items()},
    }
    if len(tested) <= MOST_SITES:
        out["sites"] = {name: _pooled({name: site}, split, sites) for name, site in tested.items()}
    return out


def _pooled(group: Mapping[str, SiteScore], split: str, sites: Mapping[str, SiteFacts]) -> Values:
    """The scores over all images of some sites."""
    samples = [s.samples for s in group.values()]
    return {
        "accuracy": _short(fmean([s.accuracy for s in group.values()], weights=samples)),
        "balanced": _short(_balanced(group, split, sites)),
        "images": sum(samples),
    }


def _balanced(group: Mapping[str, SiteScore], split: str, sites: Mapping[str, SiteFacts]) -> float:
    """The mean recall over classes, as if one site held all these images."""
    if len(group) == 1:
        return next(iter(group.values())).balanced_accuracy
    right, total = Counter[int](), Counter[int]()
    for name, score in group.items():
        for c, (recall, images) in enumerate(zip(score.recall, sites[name].images[split], strict=True)):
            if images:
                right[c] += round(recall * images)
                total[c] += images
    return fmean(right[c] / total[c] for c in total)


def _curves(rounds: Sequence[RoundSummary]) -> Values:
    curves: Values = {}
    for t in rounds:
        for name, test in t.tests.items():
            point = [t.number, _short(test.mean), _short(test.pooled)]
            curves.setdefault(name.removesuffix("/test"), []).append(point)
    return curves


def _short(share: float) -> float | None:
    return round(share, 6) if math.isfinite(share) else None


def error_of(outcome: Outcome, recipe: Recipe) -> str:
    """Why a run failed, without the path of its data: results hold no path of the machine."""
    root = recipe.data.root
    return outcome.error.replace(root, "ROOT") if root else outcome.error


def stored(name: str, findings: Findings) -> Values:
    """What a result keeps of an analysis."""
    return {"analysis": {"name": name, **findings.plain()}}


def is_analyzed(record: Values, name: str) -> bool:
    """Whether a result has what a figure with this analysis (none: "") shows; a diverged run needs nothing."""
    return not name or record["status"] != "done" or record.get("analysis", {}).get("name") == name
