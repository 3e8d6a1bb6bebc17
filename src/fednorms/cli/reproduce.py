"""`fednorms reproduce`: run the papers' tables, and show our results next to the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.cells import cell_len
from rich.text import Text

from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import Output, parse
from fednorms.cli.progress import CellWatch, Reporter
from fednorms.core.errors import BadInput
from fednorms.papers.tables.cell import MISS, cell_text
from fednorms.papers.tables.reproduce import Observer, Reproduction
from fednorms.papers.tables.reproduce import reproduce as run_table
from fednorms.papers.tables.summary import Section, order_of, winners_of
from fednorms.runs.cells import CellEvent


@dataclass
class Reproduce:
    """Run a published table and compare the results with the paper's: RESULTS.md, results.csv and results.png.

    The same command continues after an interruption; finished runs are not repeated. Data are never downloaded.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """A table of `fednorms reproduce --list`, or a folder with a custom table.toml."""
    show_all: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List all tables: the data they need, their number of runs, what has run."""
    data: Annotated[
        tyro.conf.UseAppendAction[list[Path]], tyro.conf.arg(metavar="ROOT", help_behavior_hint="(repeatable)")
    ] = field(default_factory=list)
    """Folder of a data set, or of several; settings without their data are skipped."""
    seeds: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: the table's, mostly 3)")] = None
    """Number of seeds: 0, 1, 2, ... (searches on validation images use the table's `search_seeds`)."""
    only: Annotated[list[str], tyro.conf.arg(metavar="ROW [ROW ...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """Run only these rows."""
    settings: Annotated[list[str], tyro.conf.arg(metavar="SETTING [SETTING ...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """Run only these settings."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/reproduce-NAME)")] = (
        None
    )
    """Directory of results and reports."""
    jobs: int = 1
    """Number of runs at a time, each in its own process."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    search: bool = False
    """Stop after the searches on validation images (unfinished searches always come first)."""
    report: bool = False
    """Run nothing; reuse runs of the tables next to DIR, and write the report again."""
    allow_pickle: bool = False
    """Open pickled archives of data sets; only NumPy arrays are accepted."""
    incomplete: bool = False
    """Accept data sets whose image counts differ from the published ones; the report says how."""
    output: Output = field(default_factory=Output)


def reproduce(args: Sequence[str]) -> int:
    """Run the command."""
    given = parse(Reproduce, "reproduce", args)
    if given.show_all:
        return _list(given.output)
    if not given.name:
        raise BadInput("Name a table (`fednorms reproduce --list` shows all) or a folder with a table.toml.")
    silent = given.output.quiet or given.output.json
    done = run_table(
        given.name,
        given.data,
        seeds=given.seeds,
        only=given.only,
        settings=given.settings,
        out=given.out,
        jobs=given.jobs,
        device=given.device,
        search=given.search,
        report=given.report,
        allow_pickle=given.allow_pickle,
        incomplete=given.incomplete,
        observer=_Shown(silent),
    )
    if given.output.json:
        print_json(done.to_dict())
    else:
        show(done)
    return 1 if done.failed else 0


class _Shown(Observer):
    """Show remarks and progress on stderr."""

    def __init__(self, silent: bool) -> None:
        self.silent, self.wants_estimate = silent, not silent
        self.reporter = Reporter("", 0, silent=silent)
        self.cells: CellWatch | None = None

    def say(self, text: str) -> None:
        self.reporter.say(text)

    def begin(self, title: str, rounds: int) -> None:
        self.reporter = Reporter(title, rounds, silent=self.silent)
        self.reporter.__enter__()
        self.cells = CellWatch(self.reporter)

    def watch(self, event: CellEvent) -> None:
        assert self.cells is not None
        self.cells(event)

    def end(self) -> None:
        self.reporter.__exit__(None, None, None)


def show(done: Reproduction) -> None:
    """Print the tables that have results, the verdict, and the files that were written."""
    console, summary = stdout(), done.summary
    for section in summary.sections:
        if section.shown:
            console.print(section.title, style="bold", markup=False)
            for columns in _blocks(section, console.width):
                console.print(grid(["", *columns], _rows(section, columns), numbers_from=1))
            if section.setting.ranked:
                console.print(winners_of(section), markup=False, soft_wrap=True)
            for column, why in section.not_comparable.items():
                console.print(f"† {column}: {why}", markup=False, soft_wrap=True)
            if section.order:
                console.print(order_of(section), markup=False, soft_wrap=True)
            console.print()
    if summary.records:
        paper = (
            " | published | difference; ✗ worse than published, † not comparable" if summary.table.has_published else ""
        )
        console.print(f"Cells: ours ± std over seeds{paper}.")
        console.print(summary.verdict, markup=False, soft_wrap=True)
    for run, reason in done.failed.items():
        console.print(f"{run} failed: {reason}", markup=False, soft_wrap=True)
    if done.files:
        console.print("Written: " + ", ".join(map(str, done.files)), markup=False, soft_wrap=True)


def _rows(section: Section, columns: Sequence[str]) -> list[list[str | Text]]:
    rows: list[list[str | Text]] = []
    for row, name in section.names.items():
        cells = [(section.rows[row][column], section.selectors[column]) for column in columns]
        texts = [Text(cell_text(cell, s), style="red" if cell.verdict == MISS else "") for cell, s in cells]
        rows.append([name, *texts])
    return rows


def _blocks(section: Section, width: int) -> list[list[str]]:
    """The columns in blocks as wide as the terminal, each shown with the names of the rows."""
    taken = names = max(map(cell_len, section.names.values()), default=0)
    blocks: list[list[str]] = [[]]
    for column in section.columns:
        cells = [cell_text(row[column], section.selectors[column]) for row in section.rows.values()]
        needed = 2 + max(map(cell_len, [column, *cells]))
        if blocks[-1] and taken + needed > width:
            blocks.append([])
            taken = names
        blocks[-1].append(column)
        taken += needed
    return blocks


def _list(output: Output) -> int:
    from fednorms.papers.tables.catalog import listing

    entries = listing()
    if output.json:
        print_json({"tables": [entry.to_dict() for entry in entries]})
        return 0
    rows: list[list[str | Text]] = [
        [e.name, e.paper, e.label, e.title, ", ".join(e.data), str(e.runs), _ran(e.done, e.runs, e.where)]
        for e in entries
    ]
    stdout().print(grid(["name", "paper", "label", "what it shows", "data", "runs", "finished"], rows))
    return 0


def _ran(done: int, runs: int, where: str) -> str:
    return f"{'all' if done == runs else done} ({where})" if done else "-"
