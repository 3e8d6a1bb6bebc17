"""A tournament by successive halving: many short runs, fewer longer ones, and several seeds of the last few."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Trial:
    """A method with values for what is searched: the learning rate, and perhaps options of the method."""

    arm: str
    method: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The trial in words.

        >>> Trial("fedbn", "fedbn", {"lr": 0.1}).name
        'fedbn, lr 0.1'
        """
        return ", ".join(
            [
                self.arm,
                *(
                    f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in self.values.items()
                ),
            ]
        )


@dataclass(frozen=True)
class Played:
    """A trial trained with one seed up to a round: its validation score and curve, or why it has none.

    `sites` has the correct and all validation images of each site.
    """

    trial: Trial
    seed: int
    rounds: int
    score: float | None
    curve: Sequence[tuple[int, float]] = ()
    sites: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "arm": self.trial.arm,
            "method": self.trial.method,
            "values": dict(self.trial.values),
            "seed": self.seed,
            "rounds": self.rounds,
            "score": self.score,
            "curve": [list(point) for point in self.curve],
            "sites": {site: list(counts) for site, counts in self.sites.items()},
            "seconds": self.seconds,
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Played:
        """The inverse of `to_dict`."""
        return cls(
            Trial(values["arm"], values["method"], values["values"]),
            values["seed"],
            values["rounds"],
            values["score"],
            [(int(t), float(a)) for t, a in values["curve"]],
            {site: (int(right), int(n)) for site, (right, n) in values["sites"].items()},
            values["seconds"],
            values["error"],
        )


@dataclass(frozen=True)
class Rung:
    """Up to `rounds` rounds, at most `trials` trials, of each arm at most `per_arm`, with these seeds."""

    rounds: int
    trials: int
    per_arm: int
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Rungs:
    """What happened in a rung: every run, and the trials by their mean score, best first."""

    rung: Rung
    played: list[Played]

    @property
    def ranking(self) -> list[tuple[Trial, float]]:
        """Trials with their mean score over seeds, best first; one that failed with any seed is left out.

        Of equals, the one that was proposed first comes first.
        """
        by_name: dict[str, list[Played]] = {}
        for p in self.played:
            by_name.setdefault(p.trial.name, []).append(p)
        means = []
        for several in by_name.values():
            scores = [p.score for p in several if p.score is not None]
            if scores and len(scores) == len(several):
                means.append((several[0].trial, fmean(scores)))
        return sorted(means, key=lambda item: -item[1])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**vars(self.rung), "seeds": list(self.rung.seeds), "played": [p.to_dict() for p in self.played]}


Play = Callable[[Sequence[tuple[Trial, int]], int], list[Played]]
"""Trains trials, each with a seed, up to a round; outcomes in the same order."""


def tournament(
    trials: Sequence[Trial], rungs: Sequence[Rung], play: Play, after: Callable[[Rungs], None] = lambda done: None
) -> list[Rungs]:
    """Play all rungs: in each, the best trials of the rung before, trained further.

    >>> trials = [Trial("a", "a", {"lr": lr}) for lr in (1, 2, 3)] + [Trial("b", "b", {"lr": 1})]
    >>> def play(jobs, rounds):
    ...     return [Played(t, seed, rounds, t.values["lr"] / 10 * rounds / 4) for t, seed in jobs]
    >>> done = tournament(trials, [Rung(2, 4, 4), Rung(4, 2, 1, (0, 1))], play)
    >>> [trial.name for trial, _ in done[-1].ranking], len(done[-1].played)
    (['a, lr 3', 'b, lr 1'], 4)
    """
    done: list[Rungs] = []
    field = list(trials)
    for rung in rungs:
        if done:
            field = survivors(done[-1].ranking, rung)
        if not field:
            break
        done.append(Rungs(rung, play([(t, seed) for t in field for seed in rung.seeds], rung.rounds)))
        after(done[-1])
    return done


def survivors(ranking: Sequence[tuple[Trial, float]], rung: Rung) -> list[Trial]:
    """The best trials that a rung has room for."""
    kept: list[Trial] = []
    for trial, _ in ranking:
        if len(kept) < rung.trials and sum(t.arm == trial.arm for t in kept) < rung.per_arm:
            kept.append(trial)
    return kept


_SEMIFINAL = 9


def ladder(rounds: int, arms: int, rates: int, seeds: Sequence[int], finalists: int = 3) -> list[Rung]:
    """The rungs of a tournament: all trials for a third of the rounds, the best third in full, the best with all seeds.

    If methods compete, at least nine trials pass the first rung, since a third of few trials would be too early a cut.

    Two rates of an arm may pass the first rung, because a high rate often starts better than it ends. One reaches the
    last rung, whose first seed is that of the others, so these runs are there already.

    >>> [(r.rounds, r.trials, r.per_arm, len(r.seeds)) for r in ladder(12, arms=9, rates=3, seeds=(0, 1, 2))]
    [(4, 27, 3, 1), (12, 9, 2, 1), (12, 3, 1, 3)]
    """
    trials, several, first = arms * rates, tuple(seeds), (seeds[0],)
    short, last = math.ceil(rounds / 3), min(finalists, arms) if arms > 1 else min(2, rates)
    out = [Rung(short, trials, rates, first)] if short < rounds and trials > last else []
    least = last if arms == 1 else _SEMIFINAL
    most = min(trials, max(least, math.ceil(trials / 3))) if out else trials
    out.append(Rung(rounds, most, min(2, rates) if arms > 1 and out else rates, first))
    if len(several) > 1:
        out.append(Rung(rounds, last, 1 if arms > 1 else rates, several))
    return out
