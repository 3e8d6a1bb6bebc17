"""Summary: the numbers of a table next to the published ones, with a verdict on each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from fednorms.core.markup import aligned, html_page, html_table
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.tables.agreement import Differences, Order
from fednorms.papers.tables.cell import (
    BETTER,
    FAILED,
    MISS,
    MISSING,
    TableCell,
    average,
    averages_not_comparable,
    averages_setting,
    cell_text,
    judge,
    number,
)
from fednorms.papers.tables.plan import Found
from fednorms.papers.tables.record import Values
from fednorms.papers.tables.search_table import Told
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.table import Row, Setting, Table


@dataclass(frozen=True)
class Section:
    """One setting of the table, or the averages over settings."""

    setting: Setting
    rows: dict[str, dict[str, TableCell]]
    records: list[Values]
    main: str
    order: Order | None  # of rows in the main column
    not_comparable: dict[str, str]  # columns, and why
    findings: dict[str, list[Findings]]  # by row, of a figure's analysis in each seed's run

    @property
    def title(self) -> str:
        """The heading of its table."""
        return self.setting.title or self.setting.name

    @property
    def shown(self) -> bool:
        """Whether there is anything to show: runs, or an average over settings that all have some."""
        return bool(self.records) or any(cell.ours is not None or cell.diverged for cell in self.cells)

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
        """The label of each row: its name, with its rank in a ranked table if it has a number."""
        ranked = self.setting.ranked
        numbered = {r: ranked and row[ranked].ours is not None for r, row in self.rows.items()}
        return {r: f"{place}. {r}" if numbered[r] else r for place, r in enumerate(self.rows, 1)}

    @property
    def cells(self) -> Iterator[TableCell]:
        """All cells."""
        return (cell for row in self.rows.values() for cell in row.values())

    def text_cells(self) -> list[list[str]]:
        """The cells as text, the header first."""
        return [
            ["", *self.columns],
            *(
                [name, *(cell_text(self.rows[row][c], self.selectors[c]) for c in self.columns)]
                for row, name in self.names.items()
            ),
        ]

    @property
    def has_published(self) -> bool:
        """Whether any of its cells has a published value."""
        return any(cell.published is not None for cell in self.cells)


@dataclass
class Summary:
    """A table with everything that has run of it."""

    table: Table
    sections: list[Section]
    failed: list[Values] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    searches: Told = field(default_factory=Told)

    @property
    def records(self) -> list[Values]:
        """All finished runs."""
        return [record for section in self.sections for record in section.records]

    @property
    def score(self) -> tuple[int, int]:
        """How many cells are within the tolerance or better, and how many are judged."""
        return sum(cell.verdict != MISS for cell in self._judged), len(self._judged)

    @property
    def _judged(self) -> list[TableCell]:
        return [cell for section in self.sections for cell in section.cells if cell.judged]

    @property
    def left(self) -> int:
        """How many published cells would be judged and have not run."""
        return sum(
            cell.verdict in (MISSING, FAILED) and cell.counts and bool(cell.published) and s.selectors[column].judged
            for s in self.sections
            for row in s.rows.values()
            for column, cell in row.items()
        )

    @property
    def differences(self) -> Differences | None:
        """Two-sided differences from the paper, over all judged cells."""
        return Differences.of(
            (f"{row}, {column}" + (f", {s.setting.name}" if len(self.table.settings) > 1 else ""), cell)
            for s in self.sections
            for row, cells in s.rows.items()
            for column, cell in cells.items()
        )

    @property
    def share(self) -> str:
        """What share of the table has run, and what of it can be judged, in one sentence."""
        runs = self.table.seeds * sum(row.runs_in(s) for s in self.table.settings for row in self.table.rows)
        done = min(len(self.records), runs)
        text = f"{'All' if done == runs else f'{done} of'} {runs} runs are done"
        judged = len(self._judged)
        every = judged + self.left
        return f"{text}; {judged} of {every} published cells can be judged." if every else f"{text}."

    @property
    def verdict(self) -> str:
        """The summary in one sentence."""
        good, judged = self.score
        if not self.table.has_published:
            return "The table has no published numbers, only ours."
        if not judged:
            return "No cell that has run can be compared with a published number."
        limit = self.table.tolerance
        far = sum(cell.verdict == BETTER and abs(cell.difference or 0.0) > limit for cell in self._judged)
        text = f"{good} of {judged} published cells are within {limit:g} points of the paper, or better"
        text += f" ({far} by more than {limit:g} points)" if far else ""
        return text + (f"; {self.left} more have not run." if self.left else ".")

    @property
    def legend(self) -> str:
        """What a cell shows, and what its marks mean."""
        text = "Each cell shows our mean ± sample standard deviation over seeds"
        if self.table.has_published:
            text += (
                ", then the published value and the difference. "
                f"✗ marks a result that is worse by more than {self.table.tolerance:g} points or has a diverged seed"
            )
        marked = self.table.has_published or any(section.not_comparable for section in self.sections)
        return f"{text}. † marks what is not comparable." if marked else f"{text}."

    def html(self) -> str:
        """The table as HTML."""
        blocks = []
        for section in self.sections:
            if section.shown:
                header, *rows = section.text_cells()
                blocks.append(html_page(section.title, html_table(header, rows)))
        return html_page(self.table.heading, *blocks, notes=[self.legend, self.verdict])

    def text(self) -> str:
        """The table as plain text."""
        lines = [self.table.heading, ""]
        for section in self.sections:
            if not section.shown:
                continue
            lines += [section.title, *aligned(section.text_cells())]
            lines += [winners_of(section)] if section.setting.ranked else []
            lines += [*([section.order.sentence(section.main)] if section.order else []), ""]
        return "\n".join([*lines, self.verdict, *([d.sentence()] if (d := self.differences) else [])])

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
            "differences": (d := self.differences) and asdict(d),
            "settings": [
                {
                    "name": s.setting.name,
                    "title": s.title,
                    "runs": len(s.records),
                    "main": s.main,
                    "ranked": s.setting.ranked,
                    "order": s.order and s.order.to_dict(),
                    "not_comparable": s.not_comparable,
                    "rows": {
                        name: {column: _plain(cell) for column, cell in row.items()} for name, row in s.rows.items()
                    },
                }
                for s in self.sections
            ],
            "stale": self.stale,
            "foreign": self.foreign,
            "searches": self.searches.sentences,
        }


def _plain(cell: TableCell) -> dict[str, Any]:
    published = cell.published
    return {
        "ours": cell.ours,
        "std": cell.std,
        "seeds": cell.seeds,
        "published": None if published is None else "failed" if published.failed else published.mean,
        "published_std": None if published is None else published.std,
        "difference": cell.difference,
        "verdict": cell.verdict,
    }


def summarize(table: Table, found: Found, searches: Told | None = None) -> Summary:
    """Judge what has run of a table."""
    sections = [_section(table, setting, found) for setting in table.settings]
    if table.averages:
        sections.append(_averages(table, {s.setting.name: s.not_comparable for s in sections}, found))
    failed = [record for records in found.failed.values() for record in records]
    return Summary(table, sections, failed, list(found.stale), list(found.foreign), searches or Told())


def _section(table: Table, setting: Setting, found: Found) -> Section:
    rows = [row for row in table.rows if row.runs_in(setting)]
    records = [record for row in rows for record in found.records(setting, row)]
    layouts = {str(r["data"].get("layout", "")).lower() for r in records}
    reasons = {
        column: reason.why
        for column, reason in setting.incomparable.items()
        if not reason.when or any(reason.when.lower() in layout for layout in layouts)
    }
    cells = {
        row.name: {c: _cell(table, setting, row, c, found, c not in reasons) for c in setting.columns} for row in rows
    }
    if setting.ranked:
        cells = dict(sorted(cells.items(), key=lambda item: rank(item[1][setting.ranked], setting)))
    published = {c for row in rows for c in row.published.get(setting.name, {})}
    return _with_order(setting, cells, records, reasons, rows, published, table.analysis)


def _averages(table: Table, reasons: dict[str, dict[str, str]], found: Found) -> Section:
    setting, why = averages_setting(table), averages_not_comparable(table, reasons)
    cells = {
        row.name: {a: average(table, row, a, s, found, comparable=a not in why) for a, s in setting.selectors.items()}
        for row in table.rows
    }
    return _with_order(setting, cells, [], why, table.rows, {a for row in table.rows for a in row.averages})


def _with_order(
    setting: Setting,
    cells: dict[str, dict[str, TableCell]],
    records: list[Values],
    not_comparable: dict[str, str],
    rows: Sequence[Row],
    published: Collection[str],
    analysis: str = "",
) -> Section:
    main = main_column(setting, not_comparable, published)
    counted = {row.name: cells[row.name] for row in rows if row.counts}
    in_order = Order.of(counted, main, setting.selectors[main])
    return Section(setting, cells, records, main, in_order, not_comparable, findings_of(records, analysis))


def _cell(table: Table, setting: Setting, row: Row, column: str, found: Found, comparable: bool) -> TableCell:
    selector = setting.selectors[column]
    published = row.published.get(setting.name, {}).get(column)
    records = found.records(setting, row)
    done = [r for r in records if r["status"] == "done"]
    values = [v for r in done if (v := selector.value(r, table.selection)) is not None]
    cell = judge(table, selector, published, records, values, len(records) - len(done), comparable)
    counts = row.counts and setting.counts and column not in setting.derived and not table.analysis
    verdict = FAILED if not records and found.failed.get((setting.name, row.name)) else cell.verdict
    return replace(cell, verdict=verdict, never=len(done) - len(values) if values else 0, counts=counts)


def rank(cell: TableCell, setting: Setting) -> tuple[bool, bool, float]:
    """The sorting key of a ranking: the best first, then rows of which a seed diverged, then rows without a number."""
    best_is_low = setting.selectors[setting.ranked].less_is_better
    return cell.ours is None, cell.diverged > 0, (cell.ours or 0.0) * (1 if best_is_low else -1)


def main_column(setting: Setting, not_comparable: Collection[str], published: Collection[str]) -> str:
    """The column in which the order of rows is compared with the paper: one that is called average or mean, otherwise
    one that selects a mean, otherwise the last.

    Columns with published numbers come before those without, and among these comparable ones before the others.

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
    return min(candidates, key=lambda c: (c not in published, c in not_comparable))  # the first of the best


def winners_of(section: Section) -> str:
    """The first three of a ranked table, and the best row of every other column, in one sentence."""
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
    elsewhere = "; best in other columns: " * bool(others) + "; ".join(f"{c}: {best}" for c, best in others.items())
    left = sum(row[setting.ranked].verdict == MISSING for row in section.rows.values())
    so_far = f" ({left} of {len(section.rows)} rows have not run)" if left else ""
    return f'Ranked by "{setting.ranked}"{so_far}: {", ".join(first[:3]) or "no row has a number"}{elsewhere}.'


def _numbers(section: Section, column: str) -> dict[str, float]:
    return {name: ours for name, row in section.rows.items() if (ours := row[column].ours) is not None}


# -- figures with an axis over settings or rows -------------------------------------------------------------------
Lines = dict[str, dict[str, TableCell]]
"""By the name of a line, then by step: the cell of the axis' column."""


def axis_lines(summary: Summary) -> Lines:
    """The lines over the axis, as far as they have run: one per row over settings, or one per setting over rows."""
    axis = summary.table.ladder
    if axis is None:
        return {}
    shown = {section.setting.name: section for section in summary.sections if section.shown}
    if axis.settings:
        steps = [(shown[name], step) for name, step in axis.settings.items() if name in shown]
        lines = {
            row.name: {step: s.rows[row.name][axis.column] for s, step in steps if row.name in s.rows}
            for row in summary.table.rows
        }
    else:
        lines = {
            s.title: {step: s.rows[row][axis.column] for row, step in axis.rows.items() if row in s.rows}
            for s in shown.values()
            if axis.column in s.columns
        }
    return {name: line for name, line in lines.items() if any(cell.ours is not None for cell in line.values())}


def axis_steps(summary: Summary) -> list[str]:
    """The steps of the axis at which any line has a number."""
    axis = summary.table.ladder
    lines = axis_lines(summary).values()
    names = [] if axis is None else (axis.settings or axis.rows).values()
    return [step for step in names if any(step in line and line[step].ours is not None for line in lines)]


# -- what the analysis of a figure found --------------------------------------------------------------------------
def findings_of(records: Sequence[Values], name: str) -> dict[str, list[Findings]]:
    """What an analysis found in each seed's run, by row; rows without findings are left out."""
    found: dict[str, list[Findings]] = {}
    for record in records:
        if name and record.get("analysis", {}).get("name") == name:
            found.setdefault(record["row"], []).append(Findings.of(record["analysis"]))
    return found


def numbers_of(found: dict[str, list[Findings]]) -> dict[str, dict[str, tuple[float, float | None, int]]]:
    """Mean, sample standard deviation and number of seeds, by row and name of a number.

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
