"""report: write a run, a comparison, a table or an advice as one HTML file."""

from __future__ import annotations

from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.reports.page import Page
from fednorms.reports.run import run_page
from fednorms.reports.comparison import comparison_page
from fednorms.reports.stored import RunRecord, ComparisonRecord
from fednorms.runs.result import Result
from fednorms.runs.store.atomic import clear_errors, write_atomic

FILE = "report.html"


def report(what, out=None, images=False):
    if (Path(what) / "comparison.json").exists():
        page = comparison_page(ComparisonRecord.read(Path(what)))
    else:
        page = run_page(RunRecord.read(what))
    place = Path(what) / FILE
    write_atomic(Path(out or place), page.html().encode())
    return Path(out or place)
