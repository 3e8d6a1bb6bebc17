"""reproduce: run what is left of a published table, and compare the results with the published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.core.paths import given_path
from fednorms.engines.devices import pick_device
from fednorms.papers.tables.catalog import default_out, open_table
from fednorms.papers.tables.local_weights import read_weights, with_weights
from fednorms.papers.tables.observer import Observer as Observer
from fednorms.papers.tables.observer import Shown
from fednorms.papers.tables.plan import chosen_rows, chosen_settings
from fednorms.papers.tables.reproduction import Reproduction as Reproduction
from fednorms.papers.tables.store import ResultStore
from fednorms.papers.tables.table_data import TableData
from fednorms.papers.tables.trial import rounds_of_trial, trial, trial_folder
from fednorms.papers.tables.work import Work
from fednorms.runs.option_names import option
from fednorms.runs.progress import is_wanted
from fednorms.runs.store.atomic import check_folder


def reproduce(
    name: str | Path,
    data: str | Path | Sequence[str | Path] = (),
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    out: str | Path | None = None,
    jobs: int = 1,
    device: str = "auto",
    search: bool = False,
    report: bool = False,
    allow_pickle: bool = False,
    incomplete: bool = False,
    observer: Observer | None = None,
    progress: bool | None = None,
    rounds: int | None = None,
    quick: bool = False,
    dry_run: bool = False,
    minutes: float | None = None,
    weights: Sequence[str] | Mapping[str, str | Path] = (),
) -> Reproduction:
    """Run what is left of a published table, and write RESULTS.md, results.csv and results.png into `out`.

    Calling again continues where it stopped; finished runs are stored in OUT/results.json and not repeated.

    Args:
        name: One of `fednorms reproduce --list`, or a folder with a table.toml.
        data: Folders of data sets, or folders that contain several. Settings without their data are skipped and named.
        seeds: How many seeds to run (default: the table's).
        only: Run only these rows.
        settings: Run only these settings.
        out: Where results go (default: runs/reproduce-NAME).
        jobs: Number of runs at a time, each in its own process.
        device: "cpu", "cuda" or "auto".
        search: Stop after the searches on validation images (see docs/reproduce.md).
        report: Run nothing; reuse runs of the tables next to `out`, and write the report.
        allow_pickle: Open pickled archives of NumPy arrays.
        incomplete: Accept data sets whose image counts differ from the published ones; the report says how.
        observer: Receives remarks and progress, instead of showing them.
        progress: Whether to show remarks and progress (default: on a terminal and in a notebook).
        rounds: The rounds of a trial (2); only with `quick`.
        quick: A trial of a few rounds and one seed in its own folder: marked, and never judged.
        dry_run: Run and write nothing; `planned` of the result says what would run, on which data, and how long.
        minutes: Start only runs that are expected to end within so many minutes: the first seed of every row with
            published numbers, then of the others, then the next seeds. The same call continues later.
        weights: Files with weights by model, {"torchvision:resnet18": "resnet18.safetensors"} or texts MODEL=FILE, to
            start from instead of downloading; results name file and hash.

    >>> reproduce("no-such-table")
    Traceback (most recent call last):
    fednorms.BadInput: No table "no-such-table": ...
    """
    table = with_weights(open_table(name), read_weights(weights))
    for what, number in (("jobs", jobs), ("seeds", table.seeds if seeds is None else seeds)):
        if number < 1:
            raise BadInput(f"reproduce: {what} must be an integer >= 1, got {number}.")
    given = data if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    folder = given_path("out", out) if out is not None else default_out(table)
    if few_rounds := rounds_of_trial(rounds, quick):
        table, folder = trial(table, few_rounds), trial_folder(table, few_rounds, out)
    check_folder(folder)
    if minutes is not None and not 0 < minutes < float("inf"):
        raise BadInput(f"reproduce: {option('minutes')} must be above 0, got {minutes:g}.")
    chosen = chosen_settings(table, settings)
    reading = {"allow_pickle": allow_pickle, "complete": not incomplete}
    work = Work(
        table=table,
        settings=chosen,
        rows=chosen_rows(table, only),
        seeds=list(range(seeds or table.seeds)),
        store=ResultStore(folder),
        data=TableData(table, chosen, [_folder(root) for root in given], pick_device(device), reading),
        jobs=jobs,
        observer=observer or (Shown() if is_wanted(progress) else Observer()),
        minutes=minutes,
    )
    if dry_run:
        return work.dry_run()
    try:
        return work.carry_out(search_only=search, report_only=report)
    except KeyboardInterrupt:
        work.report(interrupted=True)
        left = f"{work.finished} of {work.planned} runs finished"
        raise KeyboardInterrupt(f"Interrupted with {left}; continue with the same command.") from None


def _folder(root: str | Path) -> Path:
    path = given_path("data", root)
    if not path.exists():
        raise BadInput(f"--data {root}: there is no such folder.")
    return path
