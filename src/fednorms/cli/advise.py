"""`fednorms advise`: which method to take for a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from fednorms.cli.output import print_json, print_text
from fednorms.cli.parsing import NOT_OF_SEARCHES, Flag, SearchOptions, parse, recipe_options
from fednorms.cli.report import final_report

_Options: Any = recipe_options("AdviseOptions", without=("federation", *NOT_OF_SEARCHES))


@dataclass
class _Question:
    federation: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="FEDERATION", help_behavior_hint="")
    ] = None
    """A name (see `fednorms list federations`) or a folder of site/class/image (default: digits-shift)."""
    minutes: Annotated[float | None, tyro.conf.arg(metavar="MINUTES", help_behavior_hint="(default: 10)")] = None
    """About how long it may take: a timed probe turns minutes into rounds."""
    budget: Annotated[int | None, tyro.conf.arg(metavar="ROUNDS", help_behavior_hint="")] = None
    """Rounds of training in all, instead of minutes; the answer then repeats exactly."""
    one_model: Flag = False
    """One model for all sites is needed."""
    personal: Flag = False
    """Models are only used at the sites that train."""
    methods: Annotated[list[str] | None, tyro.conf.arg(metavar="METHOD [METHOD ...]", help_behavior_hint="")] = None
    """Methods that compete (default: nine that differ)."""
    rates: Annotated[list[float] | None, tyro.conf.arg(metavar="LR [LR ...]", help_behavior_hint="")] = None
    """Learning rates to try (default: three that suit each method)."""
    seeds: int = 3
    """Seeds of the last rung: --seed and those after it."""
    epsilon: Annotated[float | None, tyro.conf.arg(metavar="EPSILON", help_behavior_hint="")] = None
    """Add noise to the class counts that sites send: differential privacy with this epsilon."""
    retrain: Flag = False
    """Train the recommended method in full, and test it."""


@dataclass
class Advise(SearchOptions, _Options, _Question):
    """Find out which method to take for a federation.

    For example:
      fednorms advise photos/ --minutes 10
      fednorms advise photos/ --one-model --budget 2000 --jobs 4
      fednorms advise digits-shift --methods fedavg fedbn "fedwon + fedfn"

    It measures how the sites differ, leaves out methods that cannot work, trains the others briefly and the best ones
    longer, and answers with a method, its learning rate, and how sure that is. Only validation images decide. The same
    command continues after an interruption.
    """


def advise(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Advise, "advise", [a.replace("--batch", "--batch-size", 1) if _short(a) else a for a in args])
    from fednorms.advice.advise import advise as find_advice

    recipe = given.read_recipe()
    out = given.folder(recipe, "advise")
    silent = given.output.quiet or given.output.json
    try:
        advice = find_advice(
            recipe=recipe,
            minutes=given.minutes,
            budget=given.budget,
            one_model=given.one_model,
            personal=given.personal,
            methods=given.methods,
            rates=given.rates,
            seeds=given.seeds,
            epsilon=given.epsilon,
            retrain=given.retrain,
            out=out,
            jobs=given.jobs,
            progress=not silent,
        )
    except KeyboardInterrupt:
        so_far = f" The best so far is in {out / 'advice.md'}." if (out / "advice.md").exists() else ""
        raise KeyboardInterrupt(f"Interrupted. Continue with the same command.{so_far}") from None
    if report := final_report(advice):
        advice.files.append(report)
    if given.output.json:
        print_json(advice.to_dict())
        return 0
    print_text(repr(advice))
    print(f"\nwritten: {', '.join(map(str, advice.files))}")
    return 0


def _short(arg: str) -> bool:
    return arg == "--batch" or arg.startswith("--batch=")
