"""`fednorms list`: methods, models and federations."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import parse


@dataclass
class List:
    """Show all methods, models or federations."""

    what: tyro.conf.Positional[Literal["methods", "models", "federations"]]
    """What to show."""
    json: bool = False
    """Print one JSON object and nothing else."""


def list_(args: Sequence[str]) -> int:
    """The command."""
    given = parse(List, "list", args)
    if given.what == "methods":
        _methods(as_json=given.json)
        return 0
    header, rows = {"models": _models, "federations": _federations}[given.what]()
    if given.json:
        print_json({given.what: [dict(zip(header, row, strict=True)) for row in rows]})
    else:
        stdout().print(grid(header, rows))
    return 0


def _methods(*, as_json: bool) -> None:
    from fednorms.overview import COLUMNS, entries, overview

    if as_json:
        print_json({"methods": [{**vars(entry), **facts} for entry, facts in overview()]})
        return
    console = stdout()
    console.print(grid(["name", "idea", "paper", "options"], [list(vars(entry).values()) for entry in entries()]))
    console.print("\nMeasured on the model cnn-small (a few seconds):\n")
    console.print(grid(["name", *COLUMNS], [[entry.name, *facts.values()] for entry, facts in overview()]))
    console.print()
    console.print(grid(["column", "meaning"], [[title, meaning] for title, (meaning, _) in COLUMNS.items()]))
    console.print('\nAny of them combine: "scaffold + greg(alpha=1.0) + fedfn".', markup=False)


def _models() -> tuple[list[str], list[list[str]]]:
    from fednorms.models import models

    rows = [[m.name, m.description, f"{m.size}{' (any)' if m.any_size else ''}"] for m in models().values()]
    for library in ("torchvision", "timm"):
        there = importlib.util.find_spec(library) is not None
        hint = "" if there else "; not installed: pip install 'fednorms[zoo]'"
        rows.append([f"{library}:NAME", f"any classification model of {library} by its name{hint}", "its own"])
    return ["name", "what it is", "pixels"], rows


def _federations() -> tuple[list[str], list[list[str]]]:
    from fednorms.data.registry import federations

    return ["name", "what it is"], [[name, what] for name, what in federations().items()]
