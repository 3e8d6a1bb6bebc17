"""One cell of a table: our result, the published value, and the verdict on the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fednorms.papers.tables.plan import Found
from fednorms.papers.tables.record import Values
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.table import Printed, Row, Setting, Table

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


def averages_setting(table: Table) -> Setting:
    """The columns of averages in the form of a setting; each is in the unit of the first column it averages."""
    named = {setting.name: setting for setting in table.settings}
    columns = {a: named[name].columns[c] for a, of in table.averages.items() for name, c in [next(iter(of.items()))]}
    return Setting(name="averages", title="Averages over settings", columns=columns, derived=list(columns))


def averages_apart(table: Table, apart: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Averages that are not comparable, because a column is not (`apart`: by setting and column, why)."""
    found = {
        average: [f"contains {column}: {apart[name][column]}" for name, column in of.items() if column in apart[name]]
        for average, of in table.averages.items()
    }
    return {average: "; ".join(reasons) for average, reasons in found.items() if reasons}


def average(table: Table, row: Row, name: str, selector: Selector, found: Found, *, apart: bool) -> Entry:
    """A row's average over those of the settings in which it stands, of the seeds that have run in all of them.

    Its printed number repeats what the columns say: judged, but not counted once more.
    """
    settings = [s for s in table.settings if s.name in table.averages[name] and row.stands_in(s)]
    columns = [(s, table.averages[name][s.name]) for s in settings]
    by_seed = [{r["recipe"]["seed"]: r for r in found.records(s, row)} for s in settings]
    seeds = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    values, diverged = [], 0
    for runs in ([records[seed] for records in by_seed] for seed in seeds):
        if any(r["status"] != "done" for r in runs):
            diverged += 1
            continue
        scores = [s.selectors[c].value(r, table.selection) for (s, c), r in zip(columns, runs, strict=True)]
        if None not in scores:
            values.append(fmean(v for v in scores if v is not None))
    records = [by_seed[0][seed] for seed in seeds]
    return replace(judge(table, selector, row.averages.get(name), records, values, diverged, apart), counts=False)


def number(value: float, selector: Selector) -> str:
    """A number in the unit of its column.

    >>> number(98.76, Selector("mean")), number(0.0123, Selector("seconds")), number(14219210, Selector("bytes"))
    ('98.8', '0.012', '14,219,210')
    """
    if selector.kind == "seconds":
        return f"{value:.3f}"
    return f"{value:,.0f}" if selector.is_cost else f"{value:.1f}"


def print_of(printed: Printed, selector: Selector) -> str:
    """What the paper has: a number, or that training failed.

    >>> print_of(Printed(81.02, 0.3), Selector("mean")), print_of(Printed(float("-inf")), Selector("mean"))
    ('81.0', 'failed')
    """
    return "failed" if printed.failed else number(printed.mean, selector)


def ours_of(entry: Entry, selector: Selector) -> str:
    """What came out, in words."""
    if entry.ours is None:
        return DIVERGED if entry.diverged else FAILED if entry.verdict == FAILED else "-"
    text = number(entry.ours, selector) + ("" if entry.std is None else f" ± {number(entry.std, selector)}")
    text += f" ({entry.diverged} diverged)" if entry.diverged else ""
    return text + (f" ({entry.never} never)" if entry.never else "")


def said(entry: Entry, selector: Selector) -> str:
    """A cell in one line: ours, print, difference and a mark for a miss."""
    text = ours_of(entry, selector)
    if entry.printed is not None:
        text += f" | {print_of(entry.printed, selector)}"
        if entry.difference is not None:
            text += f" | {entry.difference:+.1f}"
    return text + (" ✗" if entry.verdict == MISS else " †" if entry.verdict == APART else "")
