"""Which runs of a table to start within a given time: the most informative first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from time import monotonic

from fednorms.papers.tables.plan import Job


def by_information(jobs: Sequence[Job]) -> list[int]:
    """The order in which runs say most: one seed of everything before the next, rows with published numbers first."""
    return sorted(
        range(len(jobs)), key=lambda i: (jobs[i].seed, not jobs[i].row.published.get(jobs[i].setting.name), i)
    )


def fitting(jobs: Sequence[Job], seconds: Sequence[float | None], left: float, parallel: int) -> list[int]:
    """The positions of the runs that end within `left` seconds, `parallel` at a time, most informative first.

    A run of unknown length is assumed to take as long as the others, or to fit if none is known.
    """
    known = [s for s in seconds if s is not None]
    usual = fmean(known) if known else 0.0
    free = [0.0] * max(1, parallel)  # when each process can start its next run
    chosen = []
    for i in by_information(jobs):
        expected = seconds[i]
        end = free[0] + (usual if expected is None else expected)
        if left > 0 and end <= left:
            heapq.heapreplace(free, end)
            chosen.append(i)
    return chosen


@dataclass
class Clock:
    """The time that a call has left.

    Parallel runs are slower than the single run that was timed: finished runs tell by how much.

    >>> clock = Clock(ends=monotonic() + 100)
    >>> clock.starts("a", 60.0), clock.starts("b", 200.0)
    (True, False)
    """

    ends: float
    begun: dict[object, tuple[float, float]] = field(default_factory=dict)  # by run: when, and seconds expected
    slower: list[float] = field(default_factory=list)  # seconds taken over seconds expected

    @property
    def left(self) -> float:
        """Seconds left, divided by how much slower than expected the runs were."""
        return (self.ends - monotonic()) / max(1.0, fmean(self.slower or [1.0]))

    def starts(self, run: object, expected: float | None) -> bool:
        """Whether a run still ends in time; if so, it begins now."""
        if self.left <= (expected or 0.0):
            return False
        if expected:
            self.begun[run] = monotonic(), expected
        return True

    def ended(self, run: object) -> None:
        """Note how long a run took."""
        if run in self.begun:
            began, expected = self.begun.pop(run)
            self.slower.append((monotonic() - began) / expected)
