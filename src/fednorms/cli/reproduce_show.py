"""What `fednorms reproduce` shows: what would run, and our numbers next to the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fednorms.cli.output import grid, stdout
from fednorms.core.counted import counted
from fednorms.papers.tables.cell import MISS, cell_text
from fednorms.papers.tables.dry_run import Planned
from fednorms.papers.tables.reproduce import Reproduction
from fednorms.papers.tables.summary import Section, winners_of
from fednorms.runs.progress import duration


def show_plan(plan: Planned) -> None:
    """Print what would run, on which data, and about how long."""
    console = stdout()
    console.print(plan.heading, style="bold", markup=False)
    rows = [
        [
            s.setting,
            s.data or "embedded",
            s.root or ("" if s.runs_here else "not given"),
            str(s.rows),
            " or ".join(map(str, s.rounds)),
            str(s.search) if s.search else "-",
            str(s.finished),
            str(s.left) if s.runs_here else "skipped",
        ]
        for s in plan.settings
    ]
    header = ["setting", "data", "folder", "rows", "rounds", "search", "finished", "to run"]
    console.print(grid(header, rows, numbers_from=3, optional=["folder", "search"]))
    if lacking := list(dict.fromkeys(s.data for s in plan.settings if not s.runs_here)):
        console.print(
            f"Without data: {', '.join(lacking)}. Give their folders with --data.", markup=False, soft_wrap=True
        )
    console.print(f"{counted(plan.runs, 'run')} would start. {_time(plan)}", markup=False, soft_wrap=True)
    console.print(f"Results would go to {plan.out}. Nothing was run or written.", markup=False, soft_wrap=True)


def _time(plan: Planned) -> str:
    if plan.time.seconds is None:
        return f"How long they take is not known: {plan.time.basis}"
    if not plan.time.seconds:
        return ""
    about = f"about {duration(plan.time.seconds)} on {plan.hardware} (from {plan.time.basis})"
    return f"They take {about}." if plan.runs else f"With their data, the runs take {about}."


def show(done: Reproduction) -> None:
    """Print the tables that have results, the verdict, and the files that were written."""
    console, summary = stdout(), done.summary
    for section in summary.sections:
        if section.shown:
            console.print(section.title, style="bold", markup=False)
            columns = list(section.columns)
            console.print(grid(["", *columns], _rows(section, columns), numbers_from=1))
            if section.setting.ranked:
                console.print(winners_of(section), markup=False)
            for column, why in section.not_comparable.items():
                console.print(f"† {column}: {why}", markup=False)
            if section.order:
                console.print(section.order.sentence(section.main), markup=False)
            console.print()
    if summary.records:
        paper = (
            " | published | difference; ✗ worse than published, † not comparable" if summary.table.has_published else ""
        )
        console.print(f"Cells: ours ± std over seeds{paper}.")
        console.print(f"{summary.share} {summary.verdict}", markup=False)
        if summary.differences:
            console.print(summary.differences.sentence(), markup=False)
    for run, reason in done.failed.items():
        console.print(f"{run} failed: {reason}", markup=False)
    if done.files:
        console.print("Written: " + ", ".join(map(str, done.files)), markup=False, soft_wrap=True)


def _rows(section: Section, columns: Sequence[str]) -> list[list[str | Text]]:
    rows: list[list[str | Text]] = []
    for row, name in section.names.items():
        cells = [(section.rows[row][column], section.selectors[column]) for column in columns]
        texts = [Text(cell_text(cell, s), style="red" if cell.verdict == MISS else "") for cell, s in cells]
        rows.append([name, *texts])
    return rows
