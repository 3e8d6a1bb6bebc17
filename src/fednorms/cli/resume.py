"""`fednorms resume`: continue an interrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from fednorms.cli.parsing import Output, Track, parse
from fednorms.cli.run import carry_out


@dataclass
class Resume:
    """Continue a run from its last checkpoint. The result equals that of an uninterrupted run, bit for bit.

    With --rounds, a finished run trains on. Methods and schedules that depend on the number of rounds are refused.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    rounds: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Train on to this many rounds, more than the run was made for."""
    patience: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Stop early after this many rounds without a better validation, instead of the run's own number."""
    track: Track = field(default_factory=list)
    """Trackers that log every round: tensorboard, wandb, mlflow."""
    output: Output = field(default_factory=Output)


def resume(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Resume, "resume", args)
    from fednorms.runs.driver import recipe_to_resume, refuse_no_patience, with_rounds
    from fednorms.runs.store.directory import RunDirectory

    directory = RunDirectory(given.run)
    recipe = recipe_to_resume(directory)
    asked = {"rounds": given.rounds, "patience": given.patience}
    changed = {key: value for key, value in asked.items() if value is not None}
    refuse_no_patience(directory, recipe, changed)
    recipe = recipe if given.rounds is None else with_rounds(recipe, directory, given.rounds)
    return carry_out(recipe, given.run, recipe.method, given.output, given.track, changed)
