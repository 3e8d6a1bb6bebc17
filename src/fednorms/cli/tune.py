"""`fednorms tune`: the best learning rate and options of one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from fednorms.cli.output import print_json, print_text
from fednorms.cli.parsing import Output, merged, parse, recipe_options
from fednorms.core.errors import BadInput
from fednorms.runs.recipe import Recipe

_OTHERS = ("method", "lr", "evaluate", "evaluate_every", "validate_every", "patience")
_Options: Any = recipe_options(
    "TuneOptions", without=(*_OTHERS, "checkpoint_every", "keep_checkpoints", "keep_predictions")
)


@dataclass
class _Search:
    method: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="METHOD")]
    """The method; quote sums: "scaffold + fedfn"."""
    grid: Annotated[list[str], tyro.conf.arg(metavar="NAME=V,V,... [...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """Values to try: lr or another setting of training, or an option of the method (default: three rates)."""
    seeds: int = 2
    """Seeds of the last rung: --seed and those after it."""


@dataclass
class Tune(_Options, _Search):
    """Find the best learning rate, and options, of one method on validation images.

    For example:
      fednorms tune fedbn --federation photos/
      fednorms tune fedprox --grid lr=0.03,0.1,0.3 mu=0.01,0.1,1 --rounds 20

    All values train for a third of the rounds, the best third in full, the best two with several seeds. The same
    command continues after an interruption.
    """

    recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A recipe in TOML for everything except the method; options override it."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/tune-METHOD-FEDERATION)")
    ] = None
    """Directory for the result and all runs."""
    jobs: int = 1
    """Number of runs at a time, each in its own process."""
    output: Output = field(default_factory=Output)


def tune(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Tune, "tune", args)
    from fednorms.advice.tune import FILE
    from fednorms.advice.tune import tune as search
    from fednorms.runs.run_names import slug

    base = Recipe.read(given.recipe) if given.recipe else Recipe()
    recipe = merged(base, given)
    name = recipe.federation.removeprefix("folder:").rstrip("/").rpartition("/")[2]
    out = given.out or Path("runs") / f"tune-{slug(given.method)}-{slug(name)}"
    try:
        tuned = search(
            given.method,
            recipe=recipe,
            grid=read_grid(given.grid) or None,
            seeds=given.seeds,
            out=out,
            jobs=given.jobs,
            progress=not (given.output.quiet or given.output.json),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Continue with the same command.") from None
    if given.output.json:
        print_json(tuned.to_dict())
    else:
        print_text(repr(tuned))
        print(f"written: {out / FILE}")
    return 0


def read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values by name, from NAME=V,V,...

    >>> read_grid(["lr=0.03,0.1", "variant=paper"])
    {'lr': [0.03, 0.1], 'variant': ['paper']}
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not name.strip() or not equals or not all(v.strip() for v in values.split(",")):
            raise BadInput(f'--grid: cannot read "{text}". Write NAME=V,V,... as in lr=0.03,0.1,0.3.')
        grid[name.strip()] = [_value(v.strip()) for v in values.split(",")]
    return grid


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
