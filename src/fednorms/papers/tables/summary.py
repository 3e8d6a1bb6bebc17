"""Summary: the numbers of a table next to the published ones, with a verdict on each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from fednorms.papers.analysis.findings import Findings
from fednorms.papers.tables.cell import (
    BETTER,
    FAILED,
    MISS,
    MISSING,
    Entry,
    average,
    averages_apart,
    averages_setting,
    judge,
    number,
    said,
)
from fednorms.papers.tables.plan import Found
from fednorms.papers.tables.record import Values
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.table import Row, Setting, Table


@dataclass(frozen=True)
class Section:
    """One setting of the table, or the averages over settings."""

    setting: Setting
    rows: dict[str, dict[str, Entry]]
    records: list[Values]
    main: str
    order: tuple[int, int] | None  # pairs of rows that stand in the printed order on the main column, and all pairs
    apart: dict[str, str]  # columns that are not comparable, and why
    findings: dict[str, list[Findings]]  # by row, of a figure's analysis in each seed's run

    @property
    def title(self) -> str:
        """As it stands above the table."""
        return self.setting.title or self.setting.name

    @property
    def shown(self) -> bool:
        """Whether there is anything to show: runs, or an average over settings that all have some."""
        return bool(self.records) or any(e.ours is not None or e.diverged for e in self.entries)

    @property
    def columns(self) -> list[str]:
        """The columns."""
        return list(self.setting.columns)

    @property
    def selectors(self) -> dict[str, Selector]:
        """What the columns show."""
        return self.setting.selectors

    @property
    def names(self) -> dict[str, str]:
        """What stands before each row: its name, and in a ranked table its place if it has a number."""
        ranked = self.setting.ranked
        numbered = {r: ranked and row[ranked].ours is not None for r, row in self.rows.items()}
        return {r: f"{place}. {r}" if numbered[r] else r for place, r in enumerate(self.rows, 1)}

    @property
    def entries(self) -> Iterator[Entry]:
        """All cells."""
        return (entry for entry, _ in self.cells)

    @property
    def cells(self) -> Iterator[tuple[Entry, str]]:
        """All cells, each with its column."""
        return ((entry, column) for row in self.rows.values() for column, entry in row.items())


@dataclass
class Summary:
    """A table with all that has run of it."""

    table: Table
    sections: list[Section]
    failed: list[Values] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    searches: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[Values]:
        """All finished runs."""
        return [record for section in self.sections for record in section.records]

    @property
    def score(self) -> tuple[int, int]:
        """Cells within the tolerance or better, and all cells that are judged."""
        return sum(e.verdict != MISS for e in self._judged), len(self._judged)

    @property
    def _judged(self) -> list[Entry]:
        return [e for section in self.sections for e in section.entries if e.judged]

    @property
    def left(self) -> int:
        """Printed cells that would be judged and have not run."""
        entries = ((e, section.selectors[c]) for section in self.sections for e, c in section.cells)
        return sum(e.verdict in (MISSING, FAILED) and e.counts and bool(e.printed) and s.judged for e, s in entries)

    @property
    def verdict(self) -> str:
        """The summary in one line."""
        good, judged = self.score
        if not self.table.in_print:
            return "ours alone: the table has no printed numbers"
        if not judged:
            return "no cell that has run can be judged against print"
        limit = self.table.tolerance
        far = sum(e.verdict == BETTER and abs(e.difference or 0.0) > limit for e in self._judged)
        text = f"{good} of {judged} printed cells within {limit:g} points of print or better"
        text += f", {far} of them better by more than {limit:g}" if far else ""
        return text + (f"; {self.left} more have not run" if self.left else "")

    @property
    def legend(self) -> str:
        """What stands in a cell, and what its marks mean."""
        print_and_misses = (
            ", and below it print and the difference. "
            f"✗ misses print by more than {self.table.tolerance:g} points; better than print is no miss"
        )
        text = "Every cell: ours (mean ± sample standard deviation over seeds)"
        text += print_and_misses * self.table.in_print
        apart = any(section.apart for section in self.sections)
        return f"{text}. † is not comparable." if self.table.in_print or apart else f"{text}."

    def text(self) -> str:
        """The table as plain text."""
        lines = [self.table.heading, ""]
        for section in self.sections:
            if not section.shown:
                continue
            table = [["", *section.columns]]
            table += [
                [name, *(said(section.rows[row][c], section.selectors[c]) for c in section.columns)]
                for row, name in section.names.items()
            ]
            widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
            lines += [section.title]
            lines += ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
            lines += [winners_of(section)] if section.setting.ranked else []
            lines += [*([order_of(section)] if section.order else []), ""]
        return "\n".join([*lines, self.verdict])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        good, judged = self.score
        return {
            "paper": self.table.paper,
            "label": self.table.label,
            "title": self.table.title,
            "within": good,
            "judged": judged,
            "left": self.left,
            "settings": [
                {
                    "name": s.setting.name,
                    "title": s.title,
                    "runs": len(s.records),
                    "main": s.main,
                    "ranked": s.setting.ranked,
                    "order": None if s.order is None else {"same": s.order[0], "pairs": s.order[1]},
                    "not_comparable": s.apart,
                    "rows": {
                        name: {column: _plain(entry) for column, entry in row.items()} for name, row in s.rows.items()
                    },
                }
                for s in self.sections
            ],
            "stale": self.stale,
            "foreign": self.foreign,
            "searches": self.searches,
        }


def _plain(entry: Entry) -> dict[str, Any]:
    printed = entry.printed
    return {
        "ours": entry.ours,
        "std": entry.std,
        "seeds": entry.seeds,
        "published": None if printed is None else "failed" if printed.failed else printed.mean,
        "published_std": None if printed is None else printed.std,
        "difference": entry.difference,
        "verdict": entry.verdict,
    }


def summarise(table: Table, found: Found, searches: Sequence[str] = ()) -> Summary:
    """Judge what has run of a table."""
    sections = [_section(table, setting, found) for setting in table.settings]
    if table.averages:
        sections.append(_averages(table, {s.setting.name: s.apart for s in sections}, found))
    failed = [record for records in found.failed.values() for record in records]
    return Summary(table, sections, failed, list(found.stale), list(found.foreign), list(searches))


def _section(table: Table, setting: Setting, found: Found) -> Section:
    rows = [row for row in table.rows if row.stands_in(setting)]
    records = [record for row in rows for record in found.records(setting, row)]
    layouts = {str(r["data"].get("layout", "")).lower() for r in records}
    apart = {
        column: reason.why
        for column, reason in setting.incomparable.items()
        if not reason.when or any(reason.when.lower() in layout for layout in layouts)
    }
    entries = {
        row.name: {c: _entry(table, setting, row, c, found, c in apart) for c in setting.columns} for row in rows
    }
    if setting.ranked:
        entries = dict(sorted(entries.items(), key=lambda item: standing(item[1][setting.ranked], setting)))
    printed = {c for row in rows for c in row.published.get(setting.name, {})}
    return _ordered(setting, entries, records, apart, rows, printed, table.analysis)


def _averages(table: Table, apart: dict[str, dict[str, str]], found: Found) -> Section:
    setting, reasons = averages_setting(table), averages_apart(table, apart)
    entries = {
        row.name: {a: average(table, row, a, s, found, apart=a in reasons) for a, s in setting.selectors.items()}
        for row in table.rows
    }
    return _ordered(setting, entries, [], reasons, table.rows, {a for row in table.rows for a in row.averages})


def _ordered(
    setting: Setting,
    entries: dict[str, dict[str, Entry]],
    records: list[Values],
    apart: dict[str, str],
    rows: Sequence[Row],
    printed: Collection[str],
    analysis: str = "",
) -> Section:
    main = main_column(setting, apart, printed)
    in_print = {row.name: entries[row.name] for row in rows if row.counts}
    in_order = order(in_print, main, setting.selectors[main])
    return Section(setting, entries, records, main, in_order, apart, findings_of(records, analysis))


def _entry(table: Table, setting: Setting, row: Row, column: str, found: Found, apart: bool) -> Entry:
    selector = setting.selectors[column]
    printed = row.published.get(setting.name, {}).get(column)
    records = found.records(setting, row)
    done = [r for r in records if r["status"] == "done"]
    values = [v for r in done if (v := selector.value(r, table.selection)) is not None]
    entry = judge(table, selector, printed, records, values, len(records) - len(done), apart)
    counts = row.counts and setting.counts and column not in setting.derived and not table.analysis
    verdict = FAILED if not records and found.failed.get((setting.name, row.name)) else entry.verdict
    return replace(entry, verdict=verdict, never=len(done) - len(values) if values else 0, counts=counts)


def standing(entry: Entry, setting: Setting) -> tuple[bool, bool, float]:
    """Where an entry stands in a ranking: the best first, rows of which a seed diverged behind, those without last."""
    best_is_low = setting.selectors[setting.ranked].less_is_better
    return entry.ours is None, entry.diverged > 0, (entry.ours or 0.0) * (1 if best_is_low else -1)


def main_column(setting: Setting, apart: Collection[str], printed: Collection[str]) -> str:
    """The column on which the order of rows is compared with print: one called average or mean, else one that selects
    a mean, else the last.

    Columns without a printed number come into question only if no other does, and so do, among those that have one,
    columns that are not comparable (`apart`).

    >>> setting = Setting(name="a", columns={"SVHN": "domain:svhn", "Avg": "mean", "Real": "domains:mnist,svhn"})
    >>> main_column(setting, {}, {"Avg", "Real"}), main_column(setting, {"Avg"}, {"Avg", "Real"})
    ('Avg', 'Real')
    >>> main_column(setting, {"Avg"}, {"Avg"})
    'Avg'
    """
    called = [c for c in setting.columns if c.lower().strip(".") in ("avg", "average", "mean", "all")]
    kinds = ("mean", "pooled", "domain-mean", "domains")
    selected = [c for kind in kinds for c, selector in setting.selectors.items() if selector.kind == kind]
    candidates = [*called, *selected, list(setting.columns)[-1]]
    return min(candidates, key=lambda c: (c not in printed, c in apart))  # the first of the best


def order(rows: dict[str, dict[str, Entry]], column: str, selector: Selector) -> tuple[int, int] | None:
    """How many pairs of rows stand in the printed order on a column, and how many there are; equal print is no pair.

    A row that diverged stands last.
    """
    last = math.inf if selector.less_is_better else -math.inf
    both = [
        (e.printed.mean, last if e.ours is None else e.ours)
        for r in rows.values()
        if (e := r[column]).printed and (e.ours is not None or e.diverged)
    ]
    pairs_of = [(p, q) for p, q in combinations(both, 2) if p[0] != q[0]]
    if not pairs_of:
        return None
    return sum((p[1] > q[1]) if p[0] > q[0] else (p[1] < q[1]) for p, q in pairs_of), len(pairs_of)


def winners_of(section: Section) -> str:
    """What wins a ranked table, and where: the first three of the ranking, and the first of every other column."""
    setting = section.setting
    found = {column: _numbers(section, column) for column in setting.columns}
    first = [
        f"{name} ({number(ours, setting.selectors[setting.ranked])})" for name, ours in found[setting.ranked].items()
    ]
    others = {}
    for column, selector in setting.selectors.items():
        if column != setting.ranked and not selector.is_cost and found[column]:
            best = (min if selector.less_is_better else max)(found[column].values())
            shown = number(best, selector)
            equals = [name for name, ours in found[column].items() if number(ours, selector) == shown]
            others[column] = f"{' and '.join(equals)} ({shown})"
    elsewhere = "; first elsewhere: " * bool(others) + "; ".join(f"{c}: {winner}" for c, winner in others.items())
    left = sum(row[setting.ranked].verdict == MISSING for row in section.rows.values())
    so_far = f" ({left} of {len(section.rows)} rows have not run)" if left else ""
    return f'ranked by "{setting.ranked}"{so_far}: {", ".join(first[:3]) or "no row has a number"}{elsewhere}'


def _numbers(section: Section, column: str) -> dict[str, float]:
    return {name: ours for name, row in section.rows.items() if (ours := row[column].ours) is not None}


def order_of(section: Section) -> str:
    """The order of rows in one line."""
    assert section.order is not None
    same, every = section.order
    return f'order of rows on "{section.main}": {same} of {every} pairs as printed'


Lines = dict[str, dict[str, Entry]]
"""By what a line is of, by step: the cell of the ladder's column."""


def lines_of(summary: Summary) -> Lines:
    """The lines over the ladder's steps that have run: one per row over settings, or one per setting over rows."""
    ladder = summary.table.ladder
    if ladder is None:
        return {}
    shown = {section.setting.name: section for section in summary.sections if section.shown}
    if ladder.settings:
        steps = [(shown[name], step) for name, step in ladder.settings.items() if name in shown]
        lines = {
            row.name: {
                step: section.rows[row.name][ladder.column] for section, step in steps if row.name in section.rows
            }
            for row in summary.table.rows
        }
    else:
        lines = {
            section.title: {
                step: section.rows[row][ladder.column] for row, step in ladder.rows.items() if row in section.rows
            }
            for section in shown.values()
            if ladder.column in section.columns
        }
    return {name: line for name, line in lines.items() if any(e.ours is not None for e in line.values())}


def steps_of(summary: Summary) -> list[str]:
    """The steps at which any line has a number, in the ladder's order."""
    ladder = summary.table.ladder
    lines = lines_of(summary).values()
    names = [] if ladder is None else (ladder.settings or ladder.rows).values()
    return [step for step in names if any(step in line and line[step].ours is not None for line in lines)]


def findings_of(records: Sequence[Values], name: str) -> dict[str, list[Findings]]:
    """By row, what an analysis showed in each seed's run; rows without any are left out."""
    found: dict[str, list[Findings]] = {}
    for record in records:
        if name and record.get("analysis", {}).get("name") == name:
            found.setdefault(record["row"], []).append(Findings.of(record["analysis"]))
    return found


def numbers_of(found: dict[str, list[Findings]]) -> dict[str, dict[str, tuple[float, float | None, int]]]:
    """By row and name of a number: its mean, sample standard deviation and the number of seeds that have one.

    >>> numbers_of({"FedAvg": [Findings({"gap": 1.0}), Findings({"gap": 3.0})]})
    {'FedAvg': {'gap': (2.0, 1.4142135623730951, 2)}}
    """
    return {
        row: {
            name: (fmean(v), stdev(v) if len(v) > 1 else None, len(v))
            for name in dict.fromkeys(n for f in seeds for n in f.scalars)
            if (v := [f.scalars[name] for f in seeds if math.isfinite(f.scalars.get(name, math.nan))])
        }
        for row, seeds in found.items()
    }
