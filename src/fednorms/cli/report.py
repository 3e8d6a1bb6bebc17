"""`fednorms report`: a run, a comparison, a table or an advice as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fednorms.cli.output import print_json, stderr
from fednorms.cli.parsing import Flag, parse

if TYPE_CHECKING:
    from fednorms.advice.advice import Advice
    from fednorms.papers.tables.reproduce import Reproduction
    from fednorms.runs.comparison import Comparison
    from fednorms.runs.result import Result


@dataclass
class Report:
    """Write a run, a comparison, a table or an advice as one HTML file, which needs no network.

    For example:
      fednorms report runs/fedbn-digits-shift-0
      fednorms report fedwon-table-1 --out fedwon.html

    It shows sites, scores with intervals, learning curves, confusions, calibration, what left the sites, and how to
    reproduce it. It holds no images unless --images asks for them.
    """

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|COMPARISON|TABLE|ADVICE")]
    """The folder of a run, comparison, advice or table, or the name of a table of `fednorms reproduce --list`."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(default: report.html in the folder)")
    ] = None
    """The file to write."""
    images: Flag = False
    """Show the images that the model got most wrong. Needs the data; these may be images of patients."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def report(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Report, "report", args)
    from fednorms.reports.report import report as write_report

    file = write_report(given.what, given.out, images=given.images)
    if given.json:
        print_json({"report": str(file), "bytes": file.stat().st_size})
    else:
        print(file)
    return 0


def final_report(what: Result | Comparison | Reproduction | Advice) -> Path | None:
    """Write the report at the end of a command; what has been computed counts even if this fails, with a note."""
    from fednorms.reports.report import report as write_report

    try:
        return write_report(what)
    except Exception as error:
        stderr().print(f"note: no report was written ({error or type(error).__name__})", markup=False, soft_wrap=True)
        return None
