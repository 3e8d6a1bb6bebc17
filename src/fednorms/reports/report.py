"""report: write a run, a comparison, a table or an advice as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fednorms.core.errors import BadInput
from fednorms.core.paths import given_path
from fednorms.data import Federation
from fednorms.papers.tables.reproduce import Reproduction
from fednorms.reports.advice import FILE as ADVICE
from fednorms.reports.advice import advice_page, read_advice
from fednorms.reports.comparison import best_run, comparison_page
from fednorms.reports.page import Page
from fednorms.reports.pictures import worst_cases
from fednorms.reports.run import run_page
from fednorms.reports.stored import ComparisonRecord, RunRecord
from fednorms.reports.table import is_table, stored_table, table_page
from fednorms.runs.comparison import Comparison
from fednorms.runs.option_names import flag, option
from fednorms.runs.result import Result
from fednorms.runs.store.atomic import clear_errors, write_atomic

FILE = "report.html"


@runtime_checkable
class Advised(Protocol):
    """What `advise` returns."""

    path: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        ...


def report(
    what: str | Path | Result | Comparison | Reproduction | Advised,
    out: str | Path | None = None,
    *,
    images: bool = False,
    federation: Federation | None = None,
) -> Path:
    """Write one HTML file about a run, a comparison, a table or an advice, and return its path.

    The file needs no network and opens in any browser. It holds no image of a site, unless `images` asks for the worst
    cases with their pictures. Without `out` it is written as report.html into the folder that it is about.

    Args:
        what: The folder of a run, comparison or advice, the name of a published table or a folder with its results;
            or what `run`, `compare`, `reproduce` and `advise` return.
        out: The file to write.
        images: Show the images that the model got most wrong; needs the data. They may be of patients.
        federation: The data for `images`, where a run got them as an object.

    >>> import tempfile
    >>> from fednorms.runs.driver import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = report(run("fedavg", rounds=1, out=folder + "/run"))
    ...     file.name, "Sites and what they see" in file.read_text()
    ('report.html', True)
    """
    page, folder = _page(what, images, federation)
    if out is None and folder is None:
        raise BadInput(f"This result was not stored, so say where to write its report with {option('out')}.")
    file = given_path("out", out) if out is not None else Path(folder or "") / FILE
    if file.is_dir():
        raise BadInput(f"{file} is a folder. Name a file for the report with {option('out')}, such as {file / FILE}.")
    with clear_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, page.html().encode())
    return file


def _page(
    what: str | Path | Result | Comparison | Reproduction | Advised, images: bool, federation: Federation | None
) -> tuple[Page, Path | None]:
    """The page, and the folder that it is about."""

    def of_run(run: RunRecord) -> Page:
        return run_page(run, worst_cases(run, federation) if images else None)

    def of_comparison(record: ComparisonRecord) -> Page:
        best = best_run(record) if images else None
        return comparison_page(record, worst_cases(best, federation) if best else None)

    if isinstance(what, Result):
        return of_run(RunRecord.of(what)), what.path
    if isinstance(what, Comparison):
        return of_comparison(ComparisonRecord.of(what)), what.path
    if isinstance(what, Reproduction):
        return table_page(what.summary), what.out
    if isinstance(what, Advised):
        return advice_page(what.to_dict()), what.path
    folder = given_path("what", what)
    if (folder / ADVICE).is_file():
        return advice_page(read_advice(folder)), folder
    if (folder / "recipe.toml").is_file():
        return of_run(RunRecord.read(folder)), folder
    if (folder / "comparison.json").is_file():
        return of_comparison(ComparisonRecord.read(folder)), folder
    if is_table(what):
        if images:
            raise BadInput(f"{what} is a table; its stored results have no images. Leave out {flag('images')}.")
        summary, place = stored_table(what)
        return table_page(summary), place
    raise BadInput(
        f'"{what}" is not a run, comparison, table or advice. Name a folder that run, compare, reproduce or advise '
        "wrote, or a table of `fednorms reproduce --list`."
    )
