"""`fednorms list`: methods, models, federations, partitions, transforms and analyses."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import parse


@dataclass
class List:
    """List all methods, models, federations, partition rules, transform chains or analyses."""

    what: tyro.conf.Positional[Literal["methods", "models", "federations", "partitions", "transforms", "analyses"]]
    """What to list."""
    json: bool = False
    """Print one JSON object and nothing else."""


def list_(args: Sequence[str]) -> int:
    """The command."""
    given = parse(List, "list", args)
    if given.what == "methods":
        _methods(as_json=given.json)
        return 0
    tables = {
        "models": _models,
        "federations": _federations,
        "partitions": _partitions,
        "transforms": _transforms,
        "analyses": _analyses,
    }
    header, rows = tables[given.what]()
    if given.json:
        print_json({given.what: [dict(zip(header, row, strict=True)) for row in rows]})
    else:
        stdout().print(grid(header, rows))
        if hint := _USE.get(given.what):
            stdout().print(f"\n{hint}", markup=False)
    return 0


_USE = {
    "partitions": 'Use: --partition "dirichlet(beta=0.3, clients=100)". within=domain divides every domain '
    "separately; test=deal|alike|personal|whole says how test data are divided.",
    "transforms": "Use: --augment flip_rotate. By default the data set's papers decide. Tests use none.",
    "analyses": "Use: `fednorms analyze RUN four-factors`. Curves have one point per kept round "
    '(keep_checkpoints="all"); test-gap needs a run tested with global and batch statistics.',
}


def _methods(*, as_json: bool) -> None:
    from fednorms.explain.overview import COLUMNS, entries, overview

    if as_json:
        print_json({"methods": [{**vars(entry), **facts} for entry, facts in overview()]})
        return
    console = stdout()
    rows = [[e.name, e.idea, e.paper, e.link, e.options] for e in entries()]
    console.print(grid(["name", "idea", "paper", "link", "options"], rows))
    console.print("\nMeasured with the model cnn-small (takes a few seconds):\n")
    console.print(grid(["name", *COLUMNS], [[entry.name, *facts.values()] for entry, facts in overview()]))
    console.print()
    console.print(grid(["column", "meaning"], [[title, meaning] for title, (meaning, _) in COLUMNS.items()]))
    console.print('\nMethods combine with +: "scaffold + greg(alpha=1.0) + fedfn".', markup=False)


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


def _partitions() -> tuple[list[str], list[list[str]]]:
    from fednorms.data.rules import RULES, rules

    rows = []
    for name, what in rules().items():
        options = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(RULES[name]))  # type: ignore[arg-type]
        rows.append([name, what, options])
    rows.append(["file:PATH", "a partition written by `Partition.save`, checked by its hash", ""])
    return ["name", "what it does", "options"], rows


def _transforms() -> tuple[list[str], list[list[str]]]:
    from fednorms.transforms import CHAINS

    return ["name", "what it does"], [[name, (chain.__doc__ or "").strip()] for name, chain in CHAINS.items()]


def _analyses() -> tuple[list[str], list[list[str]]]:
    from fednorms.papers.analysis.measures import ANALYSES

    return ["name", "of", "what it measures"], [[a.name, a.figures, a.says] for a in ANALYSES.values()]
