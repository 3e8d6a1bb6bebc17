"""`fednorms run`: a recipe from a file, from options, or from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fednorms.cli.output import print_json, print_text
from fednorms.cli.parsing import Output, Track, merged, parse, recipe_options
from fednorms.cli.report import final_report
from fednorms.core.errors import BadInput
from fednorms.runs.progress import Reporter
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import default_name

if TYPE_CHECKING:
    from fednorms.runs.result import Result
    from fednorms.runs.rounds import RoundEvent


_Options: Any = recipe_options("RunOptions")


@dataclass
class Run(_Options):
    """Train one method on a federation, and test it.

    For example:
      fednorms run --method fedbn --rounds 20
      fednorms run --method "scaffold + fedfn" --federation photos/ --size 64

    Settings come from options, from a recipe in TOML, or from both; options override the recipe. If the directory
    already holds the same run, unfinished, it is continued.
    """

    file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RECIPE]", help_behavior_hint="")] = None
    """A recipe in TOML, such as the recipe.toml of another run."""
    recipe: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="", metavar="FILE")] = None
    """The recipe, given as an option."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/METHOD-FEDERATION-SEED)")
    ] = None
    """Directory of the run: recipe, metrics, checkpoints, summary, report."""
    track: Track = field(default_factory=list)
    """Trackers that log every round: tensorboard, wandb, mlflow."""
    output: Output = field(default_factory=Output)


def run(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Run, "run", args)
    if given.file and given.recipe:
        raise BadInput(f'Two recipes were given, "{given.file}" and "{given.recipe}". Keep one of them.')
    file = given.file or given.recipe
    base = Recipe.read(file) if file else Recipe()
    recipe = merged(base, given)
    written = given.method or recipe.method  # "fedwon" is a better name for a directory than the sum of its parts
    out = given.out or Path("runs") / default_name(written, recipe)
    return carry_out(recipe, out, written, given.output, given.track)


def carry_out(
    recipe: Recipe,
    out: Path,
    title: str,
    output: Output,
    track: Sequence[str] = (),
    changed: Mapping[str, Any] | None = None,
) -> int:
    """Run or continue a recipe in a directory, show progress, and print the result.

    `changed` are keys of the recipe that the stored run has otherwise.
    """
    from fednorms.runs.driver import execute
    from fednorms.runs.tracking.tracker import TrackedRun
    from fednorms.runs.tracking.tracking import Tracking, asked_for
    from fednorms.runs.watch import reached as reached_in

    tracking = Tracking(asked_for(track))
    silent = output.quiet or output.json
    reached = 0
    with Reporter(title, recipe.rounds, silent=silent, start=reached_in(out)) as reporter, tracking:

        def after_round(event: RoundEvent) -> None:
            nonlocal reached
            reached = event.round
            reporter.round_done(event.round, event.row, event.scores, metric=event.recipe.metric)
            tracking.log(TrackedRun(out.name, event.recipe, out), event.row, event.scores)

        try:
            result = execute(recipe, out=out, callback=after_round, changed=changed)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_interrupted(out, reached)) from None
    for note in result.notes + tracking.notes:
        reporter.say(f"note: {note}")
    if not reached and result.rounds:
        reporter.say(f"{out} already holds this run, finished. Nothing was trained.")
    show(result, out, output, final_report(result))
    return 0


def show(result: Result, out: Path, output: Output, report: Path | None) -> None:
    """Print a result as text or JSON, and where its report is."""
    if output.json:
        tested = bool(result.curve())
        scores = {"accuracy": result.accuracy if tested else None, "domains": result.domains if tested else {}}
        print_json(scores | {"path": str(out), "report": report} | result.to_dict())
        return
    print_text(repr(result))
    print(f"  in {out}" + (f"; report: {report}" if report else ""))


def _interrupted(out: Path, reached: int) -> str:
    from fednorms.runs.store.directory import RunDirectory

    directory = RunDirectory(out)
    if not directory.recipe.exists():
        return "Interrupted before the run began."
    rows = directory.metrics()
    reached = reached or (int(rows[-1]["round"]) if rows else 0)
    when = f"after round {reached}" if reached else "before the first round was finished"
    return f"Interrupted {when}; continue with: {directory.resume_command}"
