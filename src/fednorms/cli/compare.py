"""`fednorms compare`: several methods over several seeds, one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.text import Text

from fednorms.cli.output import continued_by_repeating, grid, print_json, stdout
from fednorms.cli.parsing import Output, Track, merged, parse, recipe_options
from fednorms.cli.report import final_report
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.runs.progress import CellWatch, Reporter
from fednorms.runs.recipe import Recipe

if TYPE_CHECKING:
    from fednorms.runs.comparison import Comparison


_Options: Any = recipe_options("CompareOptions", without=("method", "seed"))


@dataclass
class _Methods:
    methods: Annotated[list[str], tyro.conf.arg(metavar="METHOD [METHOD ...]")]
    """Methods to compare; quote sums: fedavg fedbn "scaffold + fedfn"."""
    seeds: int = 3
    """Number of seeds: 0, 1, 2, ..."""


@dataclass
class Compare(_Options, _Methods):
    """Train several methods over several seeds, with the same cohorts and batches, and print one table.

    For example:
      fednorms compare --methods fedavg fedbn "scaffold + fedfn" --seeds 3
      fednorms compare --methods fedavg fedfn --search lr --federation photos/

    The same command continues an interrupted comparison. Finished runs are not repeated.
    """

    lrs: Annotated[list[str], tyro.conf.arg(metavar="METHOD=LR [METHOD=LR ...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """Learning rates of single methods; the others use --lr."""
    search: Annotated[Literal["lr"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Search every method's learning rate on validation images first, except those in --lrs."""
    recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A recipe in TOML for everything except method and seed; options override it."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/compare-FEDERATION)")
    ] = None
    """Directory for the table, the picture, the report and all runs."""
    track: Track = field(default_factory=list)
    """Trackers that log every round of every run: tensorboard, wandb, mlflow."""
    jobs: int = 1
    """Number of runs at a time, each in its own process."""
    output: Output = field(default_factory=Output)


def compare(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Compare, "compare", args)
    from fednorms.runs.compare import compare as run_comparison
    from fednorms.runs.run_names import slug

    base = Recipe.read(given.recipe) if given.recipe else Recipe()
    recipe = merged(base, given).model_copy(update={"fingerprint": ""})
    federation = recipe.federation.removeprefix("folder:").rstrip("/").rpartition("/")[2]
    out = given.out or Path("runs") / f"compare-{slug(federation)}"
    rates, notes = _rates(given.lrs), list[str]()
    if given.search:
        from fednorms.advice.tune import search_rates

        quiet = given.output.quiet or given.output.json
        with continued_by_repeating():
            found = search_rates(given.methods, rates, recipe, out / "search", jobs=given.jobs, progress=not quiet)
        rates, notes = found.rates, found.notes
    total = len(given.methods) * given.seeds * recipe.rounds
    with Reporter("compare", total, silent=given.output.quiet or given.output.json) as reporter:
        watch = CellWatch(reporter)
        try:
            comparison = run_comparison(
                given.methods,
                recipe.federation,
                recipe.model,
                seeds=given.seeds,
                lr=rates or None,
                recipe=recipe,
                out=out,
                jobs=given.jobs,
                watch=watch,
                progress=False,
                track=given.track,
            )
        except KeyboardInterrupt:
            done = f"{watch.finished} of {counted(len(given.methods) * given.seeds, 'run')}"
            raise KeyboardInterrupt(f"Interrupted with {done} finished. Continue with the same command.") from None
    if notes:
        from fednorms.runs.comparison_files import write

        comparison.about["rates"] = "searched for each method on validation images, unless given"
        comparison.notes += notes
        write(comparison, out)
    if report := final_report(comparison):
        comparison.files.append(report)
    if given.output.json:
        print_json(comparison.to_dict())
    else:
        show(comparison)
    return 1 if comparison.failed else 0


def show(comparison: Comparison) -> None:
    """Print the table, what it is about, and where it was written."""
    console = stdout()
    header, *rows = comparison.cells()
    fixed = len(header) - len(comparison.columns)
    shown = [[_styled(cell) for cell in row] for row in rows]
    console.print(grid(header, shown, numbers_from=fixed))
    console.print("\n".join([*comparison.legend(), ""]), markup=False)
    for remark in comparison.remarks():
        console.print(remark, markup=False)
    if comparison.files:
        console.print("written: " + ", ".join(map(str, comparison.files)), markup=False, soft_wrap=True)


def _styled(cell: str) -> Text:
    return Text(cell, style="bold" if cell.endswith("*") else "red" if cell == "failed" else "")


def _rates(texts: list[str]) -> dict[str, float]:
    rates = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            rates[name.strip()] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise BadInput(f'--lrs: cannot read "{text}". Write METHOD=LR, as in fedfn=0.4.')
    return rates
