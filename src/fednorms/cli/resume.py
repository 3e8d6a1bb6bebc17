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
    """Continue a run from its last checkpoint. The result equals that of an uninterrupted run, bit for bit."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    track: Track = field(default_factory=list)
    """Trackers that log every round: tensorboard, wandb, mlflow."""
    output: Output = field(default_factory=Output)


def resume(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Resume, "resume", args)
    from fednorms.runs.driver import recipe_to_resume
    from fednorms.runs.store.directory import RunDirectory

    recipe = recipe_to_resume(RunDirectory(given.run))
    return carry_out(recipe, given.run, recipe.method, given.output, given.track)
