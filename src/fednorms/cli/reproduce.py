"""`fednorms reproduce`: run the papers' tables, and show our results next to the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import Flag, Output, parse
from fednorms.cli.report import final_report
from fednorms.core.errors import BadInput


@dataclass
class Reproduce:
    """Run a published table and compare the results with the paper's: RESULTS.md, results.csv,
    results.png and report.html.

    For example:
      fednorms reproduce fedwon-table-1 --data ROOT --dry-run
      fednorms reproduce fedwon-table-1 --data ROOT --quick --rounds 3

    The same command continues after an interruption; finished runs are not repeated. Data are never downloaded.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """A table of `fednorms reproduce --list`, or a folder with a custom table.toml."""
    show_all: Annotated[bool, tyro.conf.arg(name="list", help_behavior_hint="")] = False
    """List all tables: the data they need, their number of runs, what has run."""
    data: Annotated[
        tyro.conf.UseAppendAction[list[Path]], tyro.conf.arg(metavar="ROOT", help_behavior_hint="(repeatable)")
    ] = field(default_factory=list)
    """Folder of a data set, or of several; settings without their data are skipped."""
    weights: Annotated[
        tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="MODEL=FILE", help_behavior_hint="(repeatable)")
    ] = field(default_factory=list)
    """Start a model from this file instead of downloading its weights, as torchvision:resnet18=resnet18.safetensors."""
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
    """auto (a GPU if there is one), cpu or cuda."""
    minutes: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: no limit)")] = None
    """Start only runs that end within so many minutes, the most informative first; the same command continues."""
    dry_run: Flag = False
    """Only show what would run, on which data, and about how long. A few rounds are timed if nothing has run yet."""
    quick: Flag = False
    """A trial of a few rounds and one seed in its own folder (runs/trial-NAME-N): marked, and never judged."""
    rounds: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: 2)")] = None
    """Rounds of a trial; only with --quick."""
    search: Flag = False
    """Stop after the searches on validation images (unfinished searches always come first)."""
    report: Flag = False
    """Run nothing; reuse runs of the tables next to DIR, and write the report again."""
    allow_pickle: Flag = False
    """Open pickled archives of data sets; only NumPy arrays are accepted."""
    incomplete: Annotated[Flag, tyro.conf.arg(aliases=["--no-complete"])] = False
    """Accept data sets whose image counts differ from the published ones; the report says how."""
    output: Output = field(default_factory=Output)


def reproduce(args: Sequence[str]) -> int:
    """Run the command."""
    given = parse(Reproduce, "reproduce", args)
    if given.show_all:
        return _list(given.output)
    if not given.name:
        raise BadInput("Name a table (`fednorms reproduce --list` shows all) or a folder with a table.toml.")
    from fednorms.cli.reproduce_show import show, show_plan
    from fednorms.papers.tables.observer import Shown
    from fednorms.papers.tables.reproduce import reproduce as run_table

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
        observer=Shown(silent),
        rounds=given.rounds,
        quick=given.quick,
        dry_run=given.dry_run,
        weights=given.weights,
        minutes=given.minutes,
    )
    if done.planned is not None:
        if given.output.json:
            print_json(done.planned.to_dict())
        else:
            show_plan(done.planned)
        return 0
    if done.files and (report := final_report(done)):
        done.files.append(report)
    if given.output.json:
        print_json(done.to_dict())
    else:
        show(done)
    return 1 if done.failed else 0


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
    header = ["name", "paper", "label", "what it shows", "data", "runs", "finished"]
    stdout().print(grid(header, rows, optional=["label", "paper", "finished"]))
    return 0


def _ran(done: int, runs: int, where: str) -> str:
    return f"{'all' if done == runs else done} ({where})" if done else "-"
