"""`fednorms adapt`: give a new site a model that fits its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fednorms.cli.output import print_result
from fednorms.cli.parsing import Flag, parse

Which = Literal["last", "best"]


@dataclass
class Adapt:
    """Give a new site a model: measure its own normalization statistics, then fine-tune if asked.

    Images are in FOLDER/class/image. Some are held out to test the model before and after.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """The new site's images."""
    epochs: int = 0
    """Epochs of fine-tuning (0: statistics only, which needs no labels)."""
    lr: Annotated[
        float | None, tyro.conf.arg(help_behavior_hint="(default: the method's own, or a tenth of the run's)")
    ] = None
    """Learning rate of fine-tuning."""
    test: float = 0.3
    """Fraction of the images held out for testing."""
    size: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: as in the run)")] = None
    """Resize images to this many pixels."""
    group: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: as in the run; '' for none)")] = None
    """A regular expression for file names; images with the same match stay in one split, as "(patient[0-9]+)"."""
    skip_broken: Flag = False
    """Leave out files that cannot be read."""
    which: Which = "last"
    """Start from the last round, or from the round with the best validation accuracy."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: not saved)")] = None
    """A new directory for the site's model."""
    device: str = "auto"
    """cpu, cuda, or auto (the run's own, or the CPU if that is not here)."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def adapt(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Adapt, "adapt", args)
    from fednorms.runs.use.adapt import adapt as adapt_run

    done = adapt_run(
        given.run,
        given.folder,
        out=given.out,
        epochs=given.epochs,
        lr=given.lr,
        which=given.which,
        test=given.test,
        size=given.size,
        group=given.group,
        skip_broken=given.skip_broken,
        device=given.device,
    )
    print_result(done, as_json=given.json)
    return 0
