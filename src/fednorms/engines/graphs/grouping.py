"""How many clients take their steps together, how many such groups run side by side, and whether their steps are
compiled: chosen by trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

TRIED = (8, 16, 4)  # numbers of streams, each timed for one round; results do not depend on them
STACKED_PIXELS = 2**16  # of a batch: larger ones fill a card anyway, so they are not stacked
MOST_STACKED = 64
STACK_BYTES = 2**32  # for the tensors of a stack that are as large as the model, of which there are about six


class Grouping(NamedTuple):
    """`together` clients share a step, and `streams` such groups run side by side."""

    together: int
    streams: int
    compiled: bool = False


FIRST = Grouping(1, TRIED[0])


@dataclass
class Trials:
    """Seconds per client of the groupings that were tried."""

    pixels: int  # of a batch
    model_bytes: int
    stackable: bool
    clients: int = 0  # of the largest cohort so far: sizes of stacks do not follow every cohort
    seconds: dict[Grouping, float] = field(default_factory=dict)

    def candidates(self, *, compiling: bool) -> list[Grouping]:
        """The groupings to try; the first one runs the first round.

        Numbers of streams change no bits. Steps that clients take together, and compiled steps, are rounded
        differently, and a trial may choose another one the next time: a repeatable run does not try them.
        """
        slots = [Grouping(1, count) for count in TRIED]
        if torch.backends.cudnn.deterministic:
            return slots
        stacks: list[Grouping] = []
        if self.stackable and self.pixels <= STACKED_PIXELS:
            most = min(MOST_STACKED, STACK_BYTES // max(6 * self.model_bytes, 1))
            stacks = [Grouping(_even(self.clients, min(most, -(-self.clients // n))), n) for n in (1, 2, 4)]
            stacks = [g for g in stacks if g.together > 1]
        found = slots + stacks
        if compiling and all(g in self.seconds for g in found):
            best = [min(kind, key=lambda g: self.seconds[g]) for kind in (stacks, slots) if kind]
            found += [g._replace(compiled=True) for g in best if math.isfinite(self.seconds[g])]
        return list(dict.fromkeys([*found, *(g for g in self.seconds if g.compiled)]))

    def done(self, *, compiling: bool) -> bool:
        """Whether nothing is left to try."""
        return all(g in self.seconds for g in self.candidates(compiling=compiling))

    def left(self, clients: int, rounds: int) -> float:
        """Seconds that so many rounds will take, as far as trials tell."""
        return min(self.seconds.values(), default=0.0) * clients * rounds

    def next(self, now: Grouping, seconds: float, *, compiling: bool, fits: Callable[[Grouping], bool]) -> Grouping:
        """The grouping of the next round, after one of so many seconds per client: the next to try, or the fastest."""
        self.seconds[now] = seconds
        for g in self.candidates(compiling=compiling):
            if g not in self.seconds:
                more = g.compiled or g.together > 1 or g.streams < self.clients or g.streams < now.streams
                if more and fits(g):
                    return g
                self.seconds[g] = math.inf
        return min(self.candidates(compiling=compiling), key=lambda g: self.seconds[g])

    def without_stacks(self) -> None:
        """Try no stacks from now on."""
        self.stackable = False
        self.seconds = {g: seconds for g, seconds in self.seconds.items() if g.together == 1}


def _even(clients: int, most: int) -> int:
    """The size of groups of at most `most` clients that are about equally large.

    >>> _even(50, 64), _even(50, 30), _even(10, 4)
    (50, 25, 4)
    """
    return -(-clients // -(-clients // max(most, 1)))
