"""What the search of `own_method.py` runs next: parts are added one by one to the best combinations so far.

A combination counts by its mean validation accuracy over the data sets of the plan. Nothing else decides, so a search
that was interrupted continues.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

WON = "fedwon(clip=0.64, start='xavier')"
# What may be added: the kind of part, of which a combination has at most one, and its spelling.
PARTS: tuple[tuple[str, str], ...] = (
    ("sam", "fedsam(rho=0.1)"),
    ("sam", "fedsam(rho=0.3)"),
    ("sam", "fedsam(rho=1.0, kind=asam)"),
    ("sam", "fedlesam(rho=0.1)"),
    ("filters", "wsconv(start='xavier')"),
    ("stem", "stem"),
    ("stem", "stem(fold=half)"),
    ("stem", "stem(fold=off)"),
    ("stem", "stem(fold=off, window=9)"),
    ("stem", "early_in"),
    ("mean", "ema(keep=0.8)"),
    ("mean", "ema(keep=0.9)"),
    ("server", "fedavgm(beta=0.5)"),
    ("server", "fedexp"),
    ("server", "fedacg"),
    ("mixing", "mixup"),
    ("mixing", "mixup(p=0.5)"),
    ("mixing", "mixup(kind=cutmix, p=0.5)"),
    ("images", "flip_sign"),
    ("images", "randconv"),
    ("images", "randconv(size=3)"),
    ("images", "feddg"),
    ("images", "fedrdn"),
    ("features", "fedfa"),
    ("features", "feddecorr"),
    ("targets", "smooth"),
    ("targets", "fedntd(beta=0.3)"),
    ("targets", "rdrop"),
    ("drift", "fedprox(mu=0.01)"),
    ("drift", "fedcm(alpha=0.5)"),
)
BASES: dict[str, tuple[str, ...]] = {
    "personal": ("fedbn + fedfn", "wsconv(start='xavier') + local_affine + agc + fedfn"),
    "one model": (f"{WON} + fedfn", "gn + fedfn", "anfr(gain=2) + agc + fedfn", "route_bn + fedfn"),
}
# Published methods, each at its own rate, are the bars besides the first base of a regime.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "personal": ("fedbn", "silobn", "fedbn + fedsam(rho=0.1)", "fedala"),
    "one model": (WON, "gn", "gn + fedsam(rho=0.1)", "anfr(gain=2)"),
}


@dataclass(frozen=True)
class Trial:
    """One combination at one learning rate, on one federation."""

    method: str
    lr: float
    rounds: int = 60
    data: str = "digits"
    seed: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two trials the same."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """The size of a search."""

    data: tuple[str, ...] = ("digits", "natural")
    rounds: int = 40  # of a short run
    final_rounds: int = 100
    rates: tuple[float, ...] = (0.1, 0.3, 1.0)  # continued at an end at which the best one is
    wider: int = 2  # rates beyond an end, at most
    beam: int = 2  # combinations that are extended
    depth: int = 3  # parts that may be added
    kept: int = 8  # parts that are tried beyond the first addition
    finalists: int = 3
    seeds: tuple[int, ...] = (1, 2, 3)
    parts: Sequence[tuple[str, str]] = PARTS
    bases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BASES)
    published: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PUBLISHED)


PLANS = {
    "full": Plan(),
    "tiny": Plan(
        data=("digits-shift",),
        rounds=1,
        final_rounds=2,
        rates=(0.1,),
        wider=0,
        beam=1,
        depth=2,
        kept=2,
        finalists=1,
        seeds=(1,),
        parts=(("sam", "fedsam(rho=0.1)"), ("mixing", "mixup"), ("images", "randconv")),
        bases={"one model": ("gn + fedfn",)},
        published={"one model": ("gn",)},
    ),
}

UNKNOWN = float("-inf")


@dataclass(frozen=True)
class Combination:
    """A base, and the numbers of the parts that are added to it."""

    base: str
    added: tuple[int, ...] = ()


class Progress:
    """A plan, and what is known of it: `scores` by the keys of trials."""

    def __init__(self, plan: Plan, scores: Mapping[str, float]) -> None:
        self.plan, self.scores = plan, scores

    def wanted(self) -> Iterator[Trial]:
        """All trials in the order in which they should run; later ones depend on the results of earlier ones."""
        plan = self.plan
        for bases in plan.bases.values():
            for base in bases:
                yield from self.search(base, plan.rounds, 0)
        for depth in range(plan.depth):
            for regime in plan.bases:
                for one in self.extended(regime, depth):
                    yield from self.trials(self.text(one), self.rate(one.base), plan.rounds, 0)
        rows = [method for regime in plan.bases for method in self.rows(regime)]
        for method in rows:
            yield from self.search(method, plan.final_rounds, plan.seeds[0])
        for seed in plan.seeds[1:]:
            for method in rows:
                lr = self.best(method, plan.final_rounds, plan.seeds[0])
                yield from self.trials(method, lr, plan.final_rounds, seed)

    def trials(self, method: str, lr: float, rounds: int, seed: int) -> list[Trial]:
        """A method at a rate on all data sets."""
        return [Trial(method, lr, rounds, data, seed) for data in self.plan.data]

    def value(self, method: str, lr: float, rounds: int, seed: int) -> float:
        """The mean of these trials; less than any other if one has not run."""
        return fmean(self.scores.get(trial.key, UNKNOWN) for trial in self.trials(method, lr, rounds, seed))

    def search(self, method: str, rounds: int, seed: int) -> Iterator[Trial]:
        """The trials of all rates of a method."""
        for lr in self.rates(method, rounds, seed):
            yield from self.trials(method, lr, rounds, seed)

    def rates(self, method: str, rounds: int, seed: int) -> Iterator[float]:
        """The plan's rates, then one after the other beyond the end at which the best one is."""
        found = list(self.plan.rates)
        yield from found
        for _ in range(self.plan.wider):
            best = max(found, key=lambda lr: self.value(method, lr, rounds, seed))
            if best not in (found[0], found[-1]) or self.value(method, best, rounds, seed) == UNKNOWN:
                return
            found = [round(best / 3, 3), *found] if best == found[0] else [*found, round(best * 3, 3)]
            yield found[0] if best == found[1] else found[-1]

    def best(self, method: str, rounds: int, seed: int) -> float:
        """The best rate that is known."""
        return max(self.rates(method, rounds, seed), key=lambda lr: self.value(method, lr, rounds, seed))

    def rate(self, base: str) -> float:
        """The rate of all short runs with a base: its own best one."""
        return self.best(base, self.plan.rounds, 0)

    def text(self, one: Combination) -> str:
        """A combination as a method."""
        return " + ".join((one.base, *(self.plan.parts[i][1] for i in one.added)))

    def short(self, one: Combination) -> float:
        """What short runs say of a combination."""
        return self.value(self.text(one), self.rate(one.base), self.plan.rounds, 0)

    def beam(self, regime: str, depth: int) -> list[Combination]:
        """The best combinations with so many additions; without any, the best base."""
        if depth == 0:
            return sorted((Combination(base) for base in self.plan.bases[regime]), key=self.short, reverse=True)[:1]
        made = [one for one in self.extended(regime, depth - 1) if self.short(one) > UNKNOWN]
        return sorted(made, key=self.short, reverse=True)[: self.plan.beam]

    def extended(self, regime: str, depth: int) -> list[Combination]:
        """The best combinations with so many additions, each with one more."""
        found = {}
        for one in self.beam(regime, depth):
            kinds = {self.plan.parts[i][0] for i in one.added}
            for i in self.useful(regime) if depth else range(len(self.plan.parts)):
                kind, text = self.plan.parts[i]
                if kind not in kinds and text.partition("(")[0] not in one.base:
                    found[Combination(one.base, tuple(sorted((*one.added, i))))] = None
        return list(found)

    def useful(self, regime: str) -> list[int]:
        """The additions that help the best base most by themselves."""
        alone = sorted(self.extended(regime, 0), key=self.short, reverse=True)
        return [one.added[0] for one in alone[: self.plan.kept]]

    def rows(self, regime: str) -> list[str]:
        """The methods of the last runs: published ones, bases, and the best combinations of any number of additions."""
        made = [one for depth in range(self.plan.depth) for one in self.extended(regime, depth)]
        best = sorted(dict.fromkeys(made), key=self.short, reverse=True)[: self.plan.finalists]
        return [*self.plan.published[regime], *self.plan.bases[regime], *map(self.text, best)]
