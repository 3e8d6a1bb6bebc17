"""Selectors: which number of a finished run stands in a column of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.evaluation.modes import Mode

_PLAIN = ("mean", "pooled", "domain-mean", "worst", "spread", "seconds", "bytes")
_NAMED = ("domain", "domains", "site", "rounds-to", "peak")
_OF_ROUNDS = ("seconds", "bytes")  # what a round costs, whatever is tested
_COSTS = (*_OF_ROUNDS, "rounds-to")  # neither accuracies nor judged

Stored = Mapping[str, Any]


@dataclass(frozen=True)
class Selector:
    """What a column shows, read from its text form: [balanced ]WHAT[@MODE].

    `mean` (over clients), `pooled` (over test images), `domain:NAME` (over its test images), `domains:A,B` (mean over
    these domains), `domain-mean`, `site:NAME`, `worst` and `spread` (population standard deviation) over clients are
    accuracies in per cent, of the method's headline mode or of MODE. `seconds` (median per round), `bytes` (up and down
    per client and round) and `rounds-to:0.8` (first round whose mean reaches 0.8) are plain numbers. `peak:mean` and
    `peak:pooled` are the highest of all tested rounds: a choice by test images, only good to tell whether a printed
    number was chosen that way.

    >>> Selector.read("balanced domains:amazon,webcam@unseen")
    Selector(kind='domains', names=('amazon', 'webcam'), balanced=True, mode='unseen')
    >>> Selector.read("meen")
    Traceback (most recent call last):
    fednorms.BadInput: "meen" selects nothing: did you mean "mean"? Known: bytes, ...
    """

    kind: str
    names: tuple[str, ...] = ()
    balanced: bool = False
    mode: str = ""

    @classmethod
    def read(cls, text: str) -> Selector:
        """Read the text form."""
        body, at, mode = text.partition("@")
        balanced = body.startswith("balanced ")
        kind, colon, rest = body.removeprefix("balanced ").strip().partition(":")
        names = tuple(name.strip() for name in rest.split(",")) if colon else ()
        wrong = ""
        if kind not in (*_PLAIN, *_NAMED):
            wrong = nearest(kind, (*_PLAIN, *_NAMED))
        elif kind in _NAMED and not (rest and all(names)):
            example = {"rounds-to": "0.8", "peak": "mean"}.get(kind, "NAME")
            wrong = f'write what is meant behind a colon, as in "{kind}:{example}"'
        elif kind in _PLAIN and colon:
            wrong = f'"{kind}" takes no name'
        elif kind in ("domain", "site", "peak") and len(names) > 1:
            wrong = f'"{kind}" takes one name' + (': write "domains:..."' if kind == "domain" else "")
        elif kind == "rounds-to" and not (
            _share(names[0]) and len(names) <= 2 and all(n.isdecimal() for n in names[1:])
        ):
            wrong = "the accuracy to reach is a share between 0 and 1, and may be held for some rounds: rounds-to:0.8,3"
        elif kind == "peak" and rest not in ("mean", "pooled"):
            wrong = "the highest is known of the mean over clients and of all images: peak:mean, peak:pooled"
        elif balanced and kind in (*_COSTS, "pooled", "peak"):
            wrong = f'"{kind}" has no balanced form'
        elif at and (not mode or kind in _OF_ROUNDS):
            wrong = "behind @ stands an evaluation mode, of an accuracy"
        if wrong:
            raise BadInput(f'"{text}" selects nothing: {wrong}')
        if mode:
            Mode.read(mode)
        return cls(kind, names, balanced, mode)

    @property
    def needs_curve(self) -> bool:
        """Whether every round must be tested."""
        return self.kind in ("rounds-to", "peak")

    @property
    def is_cost(self) -> bool:
        """Whether it is a number of seconds, bytes or rounds, which no tolerance in points can judge."""
        return self.kind in _COSTS

    @property
    def of_a_test(self) -> bool:
        """Whether its number comes from a test of the model, and not from what a round costs."""
        return self.kind not in _OF_ROUNDS

    @property
    def judged(self) -> bool:
        """Whether a tolerance in points of accuracy says anything about it; about costs and deviations it does not."""
        return not self.is_cost and self.kind != "spread"

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller number is the better one."""
        return self.is_cost or self.kind == "spread"

    def value(self, run: Stored, selection: str = "last") -> float | None:
        """The number for a finished run as it is stored; None where it has no such score."""
        if self.kind == "seconds":
            return _number(run["seconds"]["round"])
        if self.kind == "bytes":
            return _number(run["bytes"])
        if self.kind == "rounds-to":
            return self._rounds_to(run)
        if self.kind == "peak":
            return self._peak(run)
        best = run.get("best") if selection == "best-val" else None
        scores: Stored = best["scores"] if best else run["last"]
        found = scores.get(self.mode_among(scores, run["headline"]))
        if found is None:
            return None
        share = self._share(found, "balanced" if self.balanced else "accuracy")
        return None if share is None else 100 * share

    def mode_among(self, tested: Iterable[str], headline: str) -> str:
        """The tested mode that is meant, empty if none is: "adapted" is "adapted/own" if that is what was tested.

        >>> Selector.read("mean@adapted").mode_among(["global/global", "adapted/own"], "global/global")
        'adapted/own'
        """
        wanted, known = self.mode or headline, list(tested)
        if wanted in known:
            return wanted
        return next((name for name in known if "/" not in wanted and name.startswith(f"{wanted}/")), "")

    def _share(self, scores: Stored, what: str) -> float | None:
        """What the selector picks of the scores of one mode."""
        domains: Stored = scores["domains"]
        if self.kind in ("mean", "pooled", "worst", "spread"):
            return _number(scores["clients"][what].get(self.kind))
        if self.kind == "site":
            entry = scores.get("sites", {}).get(self.names[0])
            return None if entry is None else _number(entry[what])
        names = list(domains) if self.kind == "domain-mean" else list(self.names)
        return _mean([domains[name][what] for name in names]) if all(n in domains for n in names) else None

    def _curve(self, run: Stored) -> Sequence[Sequence[float | None]]:
        """Round, mean over clients and (not in the oldest files) pooled accuracy of every tested round."""
        curves: Stored = run.get("curve", {})
        found: Sequence[Sequence[float | None]] = curves.get(self.mode_among(curves, run["headline"]), [])
        return found

    def _rounds_to(self, run: Stored) -> float | None:
        goal, *held = map(float, self.names)
        since: list[float | None] = []  # the rounds in which it has stayed there
        for t, mean, *_ in self._curve(run):
            since = [*since, t] if mean is not None and mean >= goal else []
            if len(since) >= max([1, *held]):
                return _number(since[0])
        return None

    def _peak(self, run: Stored) -> float | None:
        at = 1 if self.names[0] == "mean" else 2
        shares = [point[at] for point in self._curve(run) if len(point) > at]
        return max((100 * share for share in shares if share is not None), default=None)

    def missing(self, sites: Mapping[str, str]) -> list[str]:
        """Which of its names the sites (or their domains) do not have; for checks before anything runs."""
        if self.kind not in ("domain", "domains", "site"):
            return []
        known = set(sites if self.kind == "site" else sites.values())
        return [f"{self.kind}:{name}: {nearest(name, known)}" for name in self.names if name not in known]


def _share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _number(value: Any) -> float | None:  # noqa: ANN401
    return None if value is None else float(value)


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return fmean(there) if there and len(there) == len(values) else None
