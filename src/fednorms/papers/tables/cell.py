"""One cell of a table: our result, the published value, and the verdict on the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fednorms.core.counted import sized
from fednorms.papers.tables.plan import Found
from fednorms.papers.tables.record import Values
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.table import Published, Row, Setting, Table

MISS, WITHIN, BETTER = "miss", "within", "better"
NOT_COMPARABLE, UNJUDGED, MISSING, DIVERGED, FAILED = "not comparable", "not judged", "missing", "diverged", "failed"


@dataclass(frozen=True)
class TableCell:
    """Our result (mean and sample standard deviation over seeds), the published value, and the verdict.

    Verdicts: miss (worse than published by more than the tolerance, or a seed diverged), within (also if training
    fails as published), better, not comparable (the setting says why), not judged (nothing was published, or points of
    accuracy cannot judge it), missing (not run), diverged or failed (every seed).
    """

    ours: float | None
    std: float | None
    seeds: int
    published: Published | None
    verdict: str
    diverged: int = 0
    never: int = 0  # seeds that never reached the accuracy to which the column counts rounds
    counts: bool = True  # False for rows and columns that the paper does not have, or that repeat others

    @property
    def difference(self) -> float | None:
        """Our result minus the published value."""
        if self.ours is None or self.published is None or self.published.failed:
            return None
        return self.ours - self.published.mean

    @property
    def judged(self) -> bool:
        """Whether it counts in "n of m"."""
        return self.counts and self.verdict in (MISS, WITHIN, BETTER)


def judge(
    table: Table,
    selector: Selector,
    published: Published | None,
    records: Sequence[Values],
    values: Sequence[float],
    diverged: int,
    comparable: bool,
) -> TableCell:
    """The cell of these values, one per seed that ended; of all its runs (`records`) some may have diverged."""
    ours, std = fmean(values) if values else None, stdev(values) if len(values) > 1 else None
    if not records:
        verdict = MISSING
    elif not comparable:
        verdict = NOT_COMPARABLE
    elif published is None or not selector.judged:
        verdict = DIVERGED if diverged == len(records) else UNJUDGED if values else MISSING
    elif published.failed:
        verdict = WITHIN if diverged or (ours is not None and ours <= _chance(records)) else BETTER
    elif diverged:
        verdict = MISS
    elif ours is None:
        verdict = MISSING
    else:
        worse = (published.mean - ours) * (-1 if selector.less_is_better else 1)
        verdict = BETTER if worse < 0 else WITHIN if worse <= table.tolerance + 1e-9 else MISS
    return TableCell(ours, std, len(values), published, verdict, diverged)


def _chance(records: Sequence[Values]) -> float:
    """The accuracy in percent up to which a model counts as guessing: 1.5 times that of one class."""
    return 150.0 / int(records[0]["data"]["classes"])


# -- averages over settings, which many papers print in a last column ---------------------------------------------
def averages_setting(table: Table) -> Setting:
    """The columns of averages in the form of a setting; each has the unit of the first column that it averages."""
    named = {setting.name: setting for setting in table.settings}
    columns = {a: named[name].columns[c] for a, of in table.averages.items() for name, c in [next(iter(of.items()))]}
    return Setting(name="averages", title="Averages over settings", columns=columns, derived=list(columns))


def averages_not_comparable(table: Table, reasons: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Averages that are not comparable because one of their columns is not (`reasons`, by setting and column)."""
    found = {
        average: [f"contains {c}: {reasons[name][c]}" for name, c in averaged.items() if c in reasons[name]]
        for average, averaged in table.averages.items()
    }
    return {average: "; ".join(why) for average, why in found.items() if why}


def average(table: Table, row: Row, name: str, selector: Selector, found: Found, *, comparable: bool) -> TableCell:
    """A row's average over its settings, seed by seed, of the seeds that have run in all of them.

    It is judged but not counted, because it repeats what the columns say.
    """
    settings = [s for s in table.settings if s.name in table.averages[name] and row.runs_in(s)]
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
    cell = judge(table, selector, row.averages.get(name), records, values, diverged, comparable)
    return replace(cell, counts=False)


# -- a cell in words ----------------------------------------------------------------------------------------------
def number(value: float, selector: Selector) -> str:
    """A number in the unit of its column.

    >>> number(98.76, Selector("mean")), number(0.0123, Selector("seconds")), number(14219210, Selector("bytes"))
    ('98.8', '0.012', '14.2 MB')
    """
    if selector.kind == "seconds":
        return f"{value:.3f}"
    if selector.kind == "bytes":
        return sized(value)
    return f"{value:,.0f}" if selector.is_cost else f"{value:.1f}"


def published_text(published: Published, selector: Selector) -> str:
    """The published value in words: a number, or "failed".

    >>> [published_text(value, Selector("mean")) for value in (Published(81.02, 0.3), Published(float("-inf")))]
    ['81.0', 'failed']
    """
    return "failed" if published.failed else number(published.mean, selector)


def ours_text(cell: TableCell, selector: Selector) -> str:
    """Our result in words."""
    if cell.ours is None:
        return DIVERGED if cell.diverged else FAILED if cell.verdict == FAILED else "-"
    text = number(cell.ours, selector) + ("" if cell.std is None else f" ± {number(cell.std, selector)}")
    text += f" ({cell.diverged} diverged)" if cell.diverged else ""
    return text + (f" ({cell.never} never)" if cell.never else "")


def mark(cell: TableCell) -> str:
    """What marks a miss, and a cell that is not comparable."""
    return " ✗" if cell.verdict == MISS else " †" if cell.verdict == NOT_COMPARABLE else ""


def cell_text(cell: TableCell, selector: Selector) -> str:
    """A cell in one line: our result, published value, difference, mark."""
    text = ours_text(cell, selector)
    if cell.published is not None:
        text += f" | {published_text(cell.published, selector)}"
        if cell.difference is not None:
            text += f" | {cell.difference:+.1f}"
    return text + mark(cell)
