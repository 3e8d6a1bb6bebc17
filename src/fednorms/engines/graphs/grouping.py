"""How many clients take their steps together, and how many such groups run side by side: chosen by trial."""

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


FIRST = Grouping(1, TRIED[0])


@dataclass
class Trials:
    """Seconds per client of the groupings that were tried."""

    pixels: int  # of a batch
    model_bytes: int
    stackable: bool
    seconds: dict[Grouping, float] = field(default_factory=dict)

    def candidates(self, clients: int) -> list[Grouping]:
        """The groupings to try; the first one runs the first round.

        Numbers of streams change no bits. Numbers of clients that take their steps together change rounding, and a
        trial may choose another one the next time: a repeatable run does not try them.
        """
        slots = [Grouping(1, count) for count in TRIED]
        if not self.stackable or torch.backends.cudnn.deterministic or self.pixels > STACKED_PIXELS:
            return slots
        most = min(MOST_STACKED, STACK_BYTES // max(6 * self.model_bytes, 1))
        stacks = [Grouping(_even(clients, min(most, -(-clients // n))), n) for n in (1, 2, 4)]
        return slots + [g for g in stacks if g.together > 1]

    def done(self, clients: int) -> bool:
        """Whether nothing is left to try."""
        return all(g in self.seconds for g in self.candidates(clients))

    def next(self, now: Grouping, clients: int, seconds: float, fits: Callable[[Grouping], bool]) -> Grouping:
        """The grouping of the next round, after one of so many seconds: the next to try, or the fastest."""
        self.seconds[now] = seconds / clients
        for g in self.candidates(clients):
            if g not in self.seconds:
                more = g.together > 1 or g.streams < clients or g.streams < now.streams
                if more and fits(g):
                    return g
                self.seconds[g] = math.inf
        return min(self.candidates(clients), key=lambda g: self.seconds[g])

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
