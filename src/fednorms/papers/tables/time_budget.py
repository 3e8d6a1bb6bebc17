"""Which runs of a table to start within a given time: the most informative first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean

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
