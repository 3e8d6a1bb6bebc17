"""Selectors: which number of a finished run a column of a table shows."""

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
_OF_ROUNDS = ("seconds", "bytes")  # costs of a round, independent of tests
_COSTS = (*_OF_ROUNDS, "rounds-to")  # not accuracies, and not judged

Stored = Mapping[str, Any]


@dataclass(frozen=True)
class Selector:
    """What a column shows, read from its text form: [balanced ]WHAT[@MODE].

    `mean` (over clients), `pooled` (over test images), `domain:NAME` (over its test images), `domains:A,B` (mean over
    these domains), `domain-mean`, `site:NAME`, `worst` and `spread` (population standard deviation) over clients are
    accuracies in percent, of the method's headline mode or of MODE. `seconds` (median per round), `bytes` (up and down
    per client and round) and `rounds-to:0.8` (first round whose mean reaches 0.8) are plain numbers. `peak:mean` and
    `peak:pooled` are the highest of all tested rounds. They are chosen on test images and only
    tell whether a published value was chosen that way.

    >>> Selector.read("balanced domains:amazon,webcam@unseen")
    Selector(kind='domains', names=('amazon', 'webcam'), balanced=True, mode='unseen')
    >>> Selector.read("meen")
    Traceback (most recent call last):
    fednorms.BadInput: "meen" is not a selector: did you mean "mean"? Known: bytes, ...
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
            wrong = f'give a value after a colon, as in "{kind}:{example}"'
        elif kind in _PLAIN and colon:
            wrong = f'"{kind}" takes no name'
        elif kind in ("domain", "site", "peak") and len(names) > 1:
            wrong = f'"{kind}" takes one name' + (': write "domains:..."' if kind == "domain" else "")
        elif kind == "rounds-to" and not (
            _share(names[0]) and len(names) <= 2 and all(n.isdecimal() for n in names[1:])
        ):
            wrong = "expected an accuracy between 0 and 1, and optionally for how many rounds it holds: rounds-to:0.8,3"
        elif kind == "peak" and rest not in ("mean", "pooled"):
            wrong = "expected peak:mean (over clients) or peak:pooled (over all images)"
        elif balanced and kind in (*_COSTS, "pooled", "peak"):
            wrong = f'"{kind}" has no balanced form'
        elif at and (not mode or kind in _OF_ROUNDS):
            wrong = "@ must be followed by an evaluation mode, and only accuracies have modes"
        if wrong:
            raise BadInput(f'"{text}" is not a selector: {wrong}')
        if mode:
            Mode.read(mode)
        return cls(kind, names, balanced, mode)

    @property
    def needs_curve(self) -> bool:
        """Whether every round must be tested."""
        return self.kind in ("rounds-to", "peak")

    @property
    def is_cost(self) -> bool:
        """Whether it is a number of seconds, bytes or rounds."""
        return self.kind in _COSTS

    @property
    def of_a_test(self) -> bool:
        """Whether its number comes from a test of the model."""
        return self.kind not in _OF_ROUNDS

    @property
    def judged(self) -> bool:
        """Whether a tolerance in points of accuracy applies to it, unlike to costs and deviations."""
        return not self.is_cost and self.kind != "spread"

    @property
    def less_is_better(self) -> bool:
        """Whether smaller is better."""
        return self.is_cost or self.kind == "spread"

    def value(self, run: Stored, selection: str = "last") -> float | None:
        """The number of a stored run; None if it has no such score."""
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
        """The tested mode that is meant, empty if none is: "adapted" means "adapted/own" if that was tested.

        >>> Selector.read("mean@adapted").mode_among(["global/global", "adapted/own"], "global/global")
        'adapted/own'
        """
        wanted, known = self.mode or headline, list(tested)
        if wanted in known:
            return wanted
        return next((name for name in known if "/" not in wanted and name.startswith(f"{wanted}/")), "")

    def _share(self, scores: Stored, what: str) -> float | None:
        """The share that is selected from the scores of one mode."""
        domains: Stored = scores["domains"]
        if self.kind in ("mean", "pooled", "worst", "spread"):
            return _number(scores["clients"][what].get(self.kind))
        if self.kind == "site":
            site = scores.get("sites", {}).get(self.names[0])
            return None if site is None else _number(site[what])
        names = list(domains) if self.kind == "domain-mean" else list(self.names)
        return _mean([domains[name][what] for name in names]) if all(n in domains for n in names) else None

    def _curve(self, run: Stored) -> Sequence[Sequence[float | None]]:
        """Round, mean over clients and (not in the oldest results) pooled accuracy of every tested round."""
        curves: Stored = run.get("curve", {})
        found: Sequence[Sequence[float | None]] = curves.get(self.mode_among(curves, run["headline"]), [])
        return found

    def _rounds_to(self, run: Stored) -> float | None:
        goal, *held = map(float, self.names)
        since: list[float | None] = []  # the latest rounds in a row that reach it
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
        """Which of its names are not among the sites or their domains."""
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
