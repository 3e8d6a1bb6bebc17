"""One cell of a table: ours, print, and the verdict on the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fednorms.papers.tables.record import Values
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.table import Printed, Table

MISS, WITHIN, BETTER = "miss", "within", "better"
APART, UNJUDGED, MISSING, DIVERGED, FAILED = "not comparable", "not judged", "missing", "diverged", "failed"


@dataclass(frozen=True)
class Entry:
    """One cell: ours (mean and sample standard deviation over seeds), what was printed, and the verdict.

    miss: worse than print by more than the tolerance, or a seed diverged; within (also: as failed as print); better;
    not comparable (the setting says why); not judged (nothing printed, or nothing that points can judge); missing
    (not run); diverged or failed (every seed).
    """

    ours: float | None
    std: float | None
    seeds: int
    printed: Printed | None
    verdict: str
    diverged: int = 0
    never: int = 0  # seeds that never reached what the column counts the rounds to
    counts: bool = True  # not for rows and columns that print does not have, beside its numbers

    @property
    def difference(self) -> float | None:
        """Ours minus print."""
        if self.ours is None or self.printed is None or self.printed.failed:
            return None
        return self.ours - self.printed.mean

    @property
    def judged(self) -> bool:
        """Whether it counts in "n of m"."""
        return self.counts and self.verdict in (MISS, WITHIN, BETTER)


def judge(
    table: Table,
    selector: Selector,
    printed: Printed | None,
    records: Sequence[Values],
    values: Sequence[float],
    diverged: int,
    apart: bool,
) -> Entry:
    """The cell of these values, one per seed that ended, of so many runs (`records`), some of which diverged."""
    ours, std = fmean(values) if values else None, stdev(values) if len(values) > 1 else None
    if not records:
        verdict = MISSING
    elif apart:
        verdict = APART
    elif printed is None or not selector.judged:
        verdict = DIVERGED if diverged == len(records) else UNJUDGED if values else MISSING
    elif printed.failed:
        verdict = WITHIN if diverged or (ours is not None and ours <= _chance(records)) else BETTER
    elif diverged:
        verdict = MISS
    elif ours is None:
        verdict = MISSING
    else:
        worse = (printed.mean - ours) * (-1 if selector.less_is_better else 1)
        verdict = BETTER if worse < 0 else WITHIN if worse <= table.tolerance + 1e-9 else MISS
    return Entry(ours, std, len(values), printed, verdict, diverged)


def _chance(records: Sequence[Values]) -> float:
    """Up to where an accuracy in per cent counts as guessing: half above that of one class in so many."""
    return 150.0 / int(records[0]["data"]["classes"])
