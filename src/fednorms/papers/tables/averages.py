"""Averages over settings, which many papers print in a last column: of each row, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from fednorms.papers.tables.entry import Entry, judge
from fednorms.papers.tables.plan import Found
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.table import Row, Setting, Table


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
