"""The report of a published table: our numbers next to the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.options import few
from fednorms.evaluation.intervals import Interval
from fednorms.papers.tables.catalog import default_out, known, open_table
from fednorms.papers.tables.cell import BETTER, MISS, TableCell, number, ours_text, published_text
from fednorms.papers.tables.explanations import Explanation
from fednorms.papers.tables.report import facts
from fednorms.papers.tables.store import ResultStore, read_records
from fednorms.papers.tables.stored_summary import stored_summary
from fednorms.papers.tables.summary import Section as Setting
from fednorms.papers.tables.summary import Summary, numbers_of, winners_of
from fednorms.reports.charts import Bar, Line, bar_chart, line_chart
from fednorms.reports.elements import Child
from fednorms.reports.page import KeyFigure, Page, Section, bullets, commands, figure, listing, note, paragraph
from fednorms.reports.sections import notes_section
from fednorms.reports.tables import Cell, Row, table

_MOST_BARS = 40
_MOST_LINES = 10


def stored_table(name: str | Path) -> tuple[Summary, Path]:
    """A table with its stored runs, and the folder for its report.

    `name` is a table of `fednorms reproduce --list`, a folder with a table.toml, or a folder that `reproduce` wrote.

    >>> stored_table("no-such-table")
    Traceback (most recent call last):
    fednorms.BadInput: No table "no-such-table": ...
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "table.toml").exists():
        return stored_summary(open_table(_table_in(folder)), folder), folder
    found = open_table(name)
    own = default_out(found)
    places = [place for place in (own, found.results) if place is not None and ResultStore(place).files()]
    if not places:
        raise BadInput(f'No run of table "{found.name}" is stored. Run `fednorms reproduce {found.name}` first.')
    return stored_summary(found, places[0]), own


def _table_in(folder: Path) -> str:
    names = sorted({str(r.get("table", "")) for file in ResultStore(folder).files() for r in read_records(file)})
    if len(names) != 1 or names[0] not in known():
        of = " and ".join(names)
        raise BadInput(
            f"{folder} has results of {of}, which is not one table of `fednorms reproduce --list`. Name the folder "
            "with the table.toml."
        )
    return names[0]


def is_table(what: str | Path) -> bool:
    """Whether this names a table, or a folder with a table's results."""
    folder = Path(what).expanduser()
    if folder.is_dir():
        return (folder / "table.toml").exists() or bool(ResultStore(folder).files())
    return str(what) in known() or folder.suffix == ".toml"


def table_page(summary: Summary) -> Page:
    """The report of a table."""
    found = summary.table
    shown = [s for s in summary.sections if s.shown]
    runs = counted(len(summary.records), "run")
    sections = [_setting(s, summary) for s in shown]
    sections += [_explanation(why) for why in (*found.explanations, *summary.searches.tables)]
    sections += [_again(summary), notes_section(_notes(summary))]
    about = f"{found.title}; {runs} in {counted(len(shown), 'setting')}"
    return Page("table", f"{found.paper} {found.label}", sentences(summary), about, _figures(summary), sections)


def sentences(summary: Summary) -> list[str]:
    """Two sentences: how many cells agree with the paper, and which row is best and how sure that is."""
    shown = [s for s in summary.sections if s.shown and s.records]
    seeds = sorted({len({r["recipe"]["seed"] for r in s.records}) for s in shown})
    if not shown:
        return [summary.verdict, "Nothing has run yet."]
    first, *_ = shown
    numbers = {row: cells[first.main] for row, cells in first.rows.items() if cells[first.main].ours is not None}
    over = " to ".join(str(n) for n in dict.fromkeys([seeds[0], seeds[-1]]))
    sure = f"each number is a mean over {over} seed{'s' * (over != '1')}"
    if not numbers:
        return [summary.verdict, f"No row of the first setting has a number yet; {sure}."]
    selector = first.selectors[first.main]
    pick = min if selector.less_is_better else max
    best = pick(numbers, key=lambda row: numbers[row].ours or 0.0)
    misses = sum(cell.verdict == MISS for s in shown for cell in s.cells)
    said = f'In "{first.main}" of {first.title}, {best} is best with {ours_text(numbers[best], selector)}'
    worse = (
        f"; {counted(misses, 'cell is', 'cells are')} worse than published by more than the tolerance" if misses else ""
    )
    return [summary.verdict, f"{said}{worse}; {sure}."]


def _figures(summary: Summary) -> list[KeyFigure]:
    good, judged = summary.score
    found = []
    if judged:
        share = f"{100 * good / judged:.0f} %, tolerance {summary.table.tolerance:g} points"
        found.append(KeyFigure("Cells as published, or better", f"{good} of {judged}", share))
    pairs = [s.order for s in summary.sections if s.order]
    if pairs:
        same, every = sum(p.same for p in pairs), sum(p.pairs for p in pairs)
        found.append(KeyFigure("Pairs of rows in the published order", f"{same} of {every}", "main columns"))
    found.append(
        KeyFigure("Runs", f"{len(summary.records):,}", f"{len(summary.failed)} failed" if summary.failed else "")
    )
    if summary.left:
        found.append(KeyFigure("Published cells that have not run", str(summary.left)))
    return found


def _setting(section: Setting, summary: Summary) -> Section:
    has = section.has_published
    rows: list[Row] = [
        [name, *(_cell(section.rows[row][column], section, column) for column in section.columns)]
        for row, name in section.names.items()
    ]
    legend = "Ours, mean ± standard deviation over seeds"
    legend += "; below it the published value and the difference." if has else "."
    if any(cell.verdict == MISS for cell in section.cells):
        legend += " ✗ in orange: worse than published by more than the tolerance, or a seed diverged."
    blocks: list[Child] = [paragraph(legend), table(["row", *section.columns], rows), _bars(section), _curves(section)]
    lines = [f"† {column}: {why}" for column, why in section.not_comparable.items()]
    lines += [winners_of(section)] if section.setting.ranked else []
    lines += [section.order.sentence(section.main)] if section.order else []
    blocks.append(bullets(lines))
    blocks.append(_analysis(section))
    blocks += [note(line) for line in facts(section, summary.table.selection)]
    return Section(section.title, blocks)


def _cell(cell: TableCell, section: Setting, column: str) -> Cell:
    selector = section.selectors[column]
    mark = {MISS: "bad"}.get(cell.verdict, "")
    text = ours_text(cell, selector) + {MISS: " ✗"}.get(cell.verdict, "")
    text += " †" if column in section.not_comparable and cell.ours is not None else ""
    below = ""
    if cell.published is not None:
        below = published_text(cell.published, selector)
        if cell.difference is not None:
            sign = "+" if cell.difference >= 0 else "−"
            below += f" ({sign}{number(abs(cell.difference), selector)})"
    kept = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}").replace(" †", "\N{NO-BREAK SPACE}†")
    return Cell(kept.replace(" ✗", "\N{NO-BREAK SPACE}✗"), cell.ours, below, mark)


def _bars(section: Setting) -> Child:
    """The main column as bars, if it is an accuracy."""
    selector = section.selectors[section.main]
    cells = {row: cells[section.main] for row, cells in section.rows.items() if cells[section.main].ours is not None}
    if selector.is_cost or not 1 < len(cells) <= _MOST_BARS:
        return None
    bars = []
    for row, cell in cells.items():
        mean, std = (cell.ours or 0.0) / 100, math.nan if cell.std is None else cell.std / 100
        paper = "" if cell.published is None else f"paper {published_text(cell.published, selector)}"
        color = 2 if cell.verdict == MISS else 3 if cell.verdict == BETTER else 1
        bars.append(Bar(row, Interval(mean, mean - std, mean + std), color, paper))
    has = section.has_published
    more = "mean ± standard deviation over seeds" + ("; green: better than published, orange: worse" if has else "")
    return figure(bar_chart({"": bars}, f"{section.title}, {section.main}"), f"{section.main} (%)", more)


def _curves(section: Setting) -> Child:
    """Learning curves, if the table keeps them."""
    lines = []
    for row in section.rows:
        runs = [r for r in section.records if r["row"] == row and r["status"] == "done" and r.get("curve")]
        points = _mean_curve([r["curve"].get(r["headline"], []) for r in runs])
        if points:
            lines.append(Line(row, [p[:2] for p in points], [p[2] for p in points] if len(runs) > 1 else ()))
    more = f"{_MOST_LINES} of {len(lines)} rows" if len(lines) > _MOST_LINES else ""
    chart = line_chart(lines[:_MOST_LINES], f"Learning curves, {section.title}")
    return figure(chart, "Mean test accuracy over clients (%)", more)


def _mean_curve(curves: Sequence[Sequence[Sequence[Any]]]) -> list[tuple[float, float, tuple[float, float]]]:
    """Mean over seeds of the rounds that all have tested, with one standard deviation around it."""
    by_round: dict[int, list[float]] = {}
    for curve in curves:
        for at, mean, *_ in curve:
            if mean is not None:
                by_round.setdefault(int(at), []).append(float(mean))
    found = []
    for at, values in sorted(by_round.items()):
        if len(values) == len(curves):
            middle, std = fmean(values), stdev(values) if len(values) > 1 else 0.0
            found.append((float(at), middle, (max(0.0, middle - std), min(1.0, middle + std))))
    return found


def _analysis(section: Setting) -> Child:
    """The numbers of a figure's analysis."""
    numbers = numbers_of(section.findings)
    names = list(dict.fromkeys(name for row in numbers.values() for name in row))
    if not names:
        return None
    rows: list[Row] = [[row, *(_found(values, name) for name in names)] for row, values in numbers.items()]
    return table(["analysis", *names], rows)


def _found(values: Mapping[str, tuple[float, float | None, int]], name: str) -> Cell:
    if name not in values:
        return Cell("-")
    mean, std, _ = values[name]
    return Cell(f"{mean:.4g}" + ("" if std is None else f" ± {std:.2g}"), mean)


def _explanation(why: Explanation) -> Section:
    rows: list[Row] = [[first, *map(Cell, rest)] for first, *rest in why.rows]
    return Section(why.title, [table(why.header, rows, sort=False), bullets(why.notes)])


def _again(summary: Summary) -> Section:
    found = summary.table
    lines = [
        f"fednorms reproduce {found.name} --data ROOT --dry-run    # what would run",
        f"fednorms reproduce {found.name} --data ROOT",
    ]
    blocks: list[Child] = [commands(lines)]
    if found.path is not None and found.path.is_file():
        blocks.append(listing(found.path.read_text(encoding="utf-8")[:60_000]))
    return Section("How to reproduce", blocks, "Reproduce")


def _notes(summary: Summary) -> list[str]:
    lines = [d.sentence()] if (d := summary.differences) else []
    lines += [*summary.table.notes, *summary.searches.others]
    lines += [f"{r['row']} ({r['setting']}), seed {r['recipe']['seed']} failed: {r['error']}" for r in summary.failed]
    if missing := [s.title for s in summary.sections if not s.shown]:
        lines.append(f"Not run yet: {'; '.join(missing)}.")
    if summary.stale:
        lines.append(f"Not used, because the table's recipe has changed since: {few(summary.stale)}.")
    if summary.foreign:
        lines.append(f"Not used, because they were made with other data: {few(summary.foreign)}.")
    lines.append("Single images, confusion matrices and calibration are not part of a table's stored results.")
    return lines
