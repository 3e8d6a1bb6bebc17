"""How much a tournament may cost: rounds, or minutes that a timed probe turns into rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fednorms.advice.arms import Arm
from fednorms.advice.tournament import Rung, ladder

LEAST = 4  # rounds of the last rung: with fewer, a tournament compares first steps
SEEDS = 3


@dataclass(frozen=True)
class Budget:
    """Rounds of training for a whole tournament, and where the number comes from.

    A round of a method that passes the data twice counts twice. `seconds` is the time of a round of FedAvg with its
    validation, as it was measured once; with the same number, a tournament repeats exactly.
    """

    rounds: float
    minutes: float | None = None
    seconds: float | None = None
    jobs: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return dict(vars(self))

    @classmethod
    def of_minutes(cls, minutes: float, seconds: float, jobs: int = 1) -> Budget:
        """The rounds that fit into so many minutes if one takes so many seconds.

        >>> Budget.of_minutes(10, seconds=0.5).rounds
        1200
        """
        return cls(int(60 * minutes / max(seconds, 1e-3)) * jobs, minutes, seconds, jobs)


@dataclass(frozen=True)
class Schedule:
    """The arms and rates that a budget has room for, the rungs, and what they cost in rounds."""

    arms: list[Arm]
    rungs: list[Rung]
    cost: float
    left_out: Mapping[str, str] = field(default_factory=dict)


def schedule(
    arms: Sequence[Arm], budget: float, rounds: int, seeds: Sequence[int] = (0, 1, 2), least: int = LEAST
) -> Schedule:
    """The longest tournament that a budget allows, up to `rounds` per run.

    If the last rung would have fewer than `least` rounds, seeds go first, then rates, then the arms of which least is
    expected. Without room for two arms there are no rungs.
    """
    field_of_arms, left_out = list(arms), dict[str, str]()
    several, rates = tuple(seeds), max((len(arm.rates) for arm in arms), default=1)
    least = min(least, rounds)
    while len(field_of_arms) >= min(2, len(arms)):
        fitting = [_thinned(arm, rates) for arm in field_of_arms]
        for length in range(rounds, least - 1, -1):
            rungs = ladder(length, len(fitting), rates, several)
            if (price := cost(fitting, rungs)) <= budget:
                return Schedule(fitting, rungs, price, left_out)
        if len(several) > 1:
            several = several[:-1]
        elif rates > 1:
            rates -= 1
        else:
            gone = field_of_arms.pop()
            left_out[gone.name] = "There was no time for it, and less was expected of it than of the others."
    return Schedule([_thinned(arm, rates) for arm in field_of_arms], [], 0.0, left_out)


def cost(arms: Sequence[Arm], rungs: Sequence[Rung]) -> float:
    """The most that rungs can cost, in rounds of FedAvg: the dearest arms survive, and seed 0 is continued."""
    trials = sorted((arm.passes for arm in arms for _ in arm.rates), reverse=True)
    total, before = 0.0, 0
    for rung in rungs:
        playing = trials[: rung.trials]
        more = rung.rounds - before + rung.rounds * (len(rung.seeds) - 1)
        total += more * sum(playing)
        before = rung.rounds
    return total


def _thinned(arm: Arm, rates: int) -> Arm:
    """An arm with fewer rates: of three, the middle ones first."""
    if len(arm.rates) <= rates:
        return arm
    middle = len(arm.rates) // 2
    nearest = sorted(arm.rates, key=lambda rate: (abs(arm.rates.index(rate) - middle), rate))[:rates]
    return Arm(arm.name, arm.method, tuple(sorted(nearest)), arm.reason, arm.cost, arm.prior)
