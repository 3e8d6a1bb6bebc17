"""`fednorms reproduce`: the papers' tables, ours beside print."""

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
from fednorms.papers.tables.cell import MISS, said
from fednorms.papers.tables.reproduce import Observer, Reproduction
from fednorms.papers.tables.reproduce import reproduce as run_table
from fednorms.papers.tables.summary import Section, order_of, winners_of
from fednorms.runs.cells import CellEvent


@dataclass
class Reproduce:
    """Run a published table, and set ours beside print: RESULTS.md, results.csv and results.png.

    The same command continues where it was interrupted; finished runs are not repeated. Data are never downloaded.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """A table of `fednorms reproduce --list`, or a folder with a table.toml of your own."""
    show_all: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Show every table: what data it needs, how many runs it is, what has been run."""
    data: Annotated[
        tyro.conf.UseAppendAction[list[Path]], tyro.conf.arg(metavar="ROOT", help_behavior_hint="(repeatable)")
    ] = field(default_factory=list)
    """Folder of a data set, or of several; settings whose data are missing are skipped."""
    seeds: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: the table's, mostly 3)")] = None
    """How many seeds: 0, 1, 2, ... (a search on validation images has its own, `search_seeds` of the table)."""
    only: Annotated[list[str], tyro.conf.arg(metavar="ROW [ROW ...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """Run these rows only."""
    settings: Annotated[list[str], tyro.conf.arg(metavar="SETTING [SETTING ...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """Run these settings only."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/reproduce-NAME)")] = (
        None
    )
    """Directory of results and reports."""
    jobs: int = 1
    """How many runs at a time, each in a process of its own."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    search: bool = False
    """Stop after the searches on validation images (where a table has some and they are not done, they come first)."""
    report: bool = False
    """Run nothing: take over what tables beside DIR have run, and write the report anew."""
    allow_pickle: bool = False
    """Open pickled archives of data sets; nothing but NumPy arrays is admitted."""
    incomplete: bool = False
    """Accept data sets with other counts than the published ones; the report says what differs."""
    output: Output = field(default_factory=Output)


def reproduce(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Reproduce, "reproduce", args)
    if given.show_all:
        return _list(given.output)
    if not given.name:
        raise BadInput("name a table (`fednorms reproduce --list` shows all), or a folder with a table.toml.")
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
    """Remarks and progress on stderr."""

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
    """Print the tables that have results, the verdict, and where all was written."""
    console, summary = stdout(), done.summary
    for section in summary.sections:
        if section.shown:
            console.print(section.title, style="bold", markup=False)
            for columns in _blocks(section, console.width):
                console.print(grid(["", *columns], _rows(section, columns), numbers_from=1))
            if section.setting.ranked:
                console.print(winners_of(section), markup=False, soft_wrap=True)
            for column, why in section.apart.items():
                console.print(f"† {column}: {why}", markup=False, soft_wrap=True)
            if section.order:
                console.print(order_of(section), markup=False, soft_wrap=True)
            console.print()
    if summary.records:
        beside = " | print | difference; ✗ misses print, † is not comparable" if summary.table.in_print else ""
        console.print(f"Cells: ours ± std over seeds{beside}.")
        console.print(f"{summary.verdict}.", markup=False, soft_wrap=True)
    for run, reason in done.failed.items():
        console.print(f"{run} failed: {reason}", markup=False, soft_wrap=True)
    if done.files:
        console.print("written: " + ", ".join(map(str, done.files)), markup=False, soft_wrap=True)


def _rows(section: Section, columns: Sequence[str]) -> list[list[str | Text]]:
    rows: list[list[str | Text]] = []
    for row, name in section.names.items():
        entries = [(section.rows[row][column], section.selectors[column]) for column in columns]
        cells = [Text(said(e, selector), style="red" if e.verdict == MISS else "") for e, selector in entries]
        rows.append([name, *cells])
    return rows


def _blocks(section: Section, width: int) -> list[list[str]]:
    """The columns in blocks as wide as the terminal, so that every one stands whole beside the rows' names."""
    taken = names = max(map(cell_len, section.names.values()), default=0)
    blocks: list[list[str]] = [[]]
    for column in section.columns:
        cells = [said(row[column], section.selectors[column]) for row in section.rows.values()]
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
    stdout().print(grid(["name", "paper", "as printed", "what it shows", "data", "runs", "run here"], rows))
    return 0


def _ran(done: int, runs: int, where: str) -> str:
    return f"{'all' if done == runs else done} ({where})" if done else "-"
