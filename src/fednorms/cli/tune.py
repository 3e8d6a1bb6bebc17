"""`fednorms tune`: the best learning rate and options of one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from fednorms.cli.output import continued_by_repeating, print_json, print_text
from fednorms.cli.parsing import NOT_OF_SEARCHES, SearchOptions, parse, recipe_options
from fednorms.core.errors import BadInput

_Options: Any = recipe_options("TuneOptions", without=NOT_OF_SEARCHES)


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
class Tune(SearchOptions, _Options, _Search):
    """Find the best learning rate, and options, of one method on validation images.

    For example:
      fednorms tune fedbn --federation photos/
      fednorms tune fedprox --grid lr=0.03,0.1,0.3 mu=0.01,0.1,1 --rounds 20

    All values train for a third of the rounds, the best third in full, the best two with several seeds. The same
    command continues after an interruption.
    """


def tune(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Tune, "tune", args)
    from fednorms.advice.tune import FILE
    from fednorms.advice.tune import tune as search
    from fednorms.runs.run_names import slug

    recipe = given.read_recipe()
    out = given.folder(recipe, "tune", slug(given.method))
    with continued_by_repeating():
        tuned = search(
            given.method,
            recipe=recipe,
            grid=read_grid(given.grid) or None,
            seeds=given.seeds,
            out=out,
            jobs=given.jobs,
            progress=not (given.output.quiet or given.output.json),
        )
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
