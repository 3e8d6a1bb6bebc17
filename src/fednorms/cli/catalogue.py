"""`fednorms list`: methods, models and federations."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    header, rows = {"methods": _methods, "models": _models, "federations": _federations}[given.what]()
    if given.json:
        print_json({given.what: [dict(zip(header, row, strict=True)) for row in rows]})
        return 0
    console = stdout()
    console.print(grid(header, rows))
    if given.what == "methods":
        console.print('\nAny of them combine: "scaffold + greg(alpha=1.0) + fedfn".', markup=False)
    return 0


def _methods() -> tuple[list[str], list[list[str]]]:
    from fednorms.method import names
    from fednorms.part import REGISTRY, SUMS

    rows = []
    for name in names():
        if name == "fedavg":
            idea = "Train on every client, average the models weighted by data size."
            rows.append([name, idea, "McMahan et al. 2017", ""])
            continue
        made: Any = SUMS.get(name) or REGISTRY[name]
        doc = inspect.getdoc(made) or ""
        paper = getattr(made, "paper", "") or _paper(doc)
        rows.append([name, _first_sentence(doc), paper, _defaults(made)])
    return ["name", "idea", "paper", "options"], rows


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[^ .][.])\s+(?=[A-Z])", paragraph)[0]


def _paper(doc: str) -> str:
    """Authors and year, from a docstring that says "Paper: Zhuang and Lyu, FedWon, ICLR 2024"."""
    found = re.search(r"Paper: ([^,]+),.*?\b((?:19|20)\d\d)\b", " ".join(doc.split()))
    return f"{found[1]} {found[2]}" if found else ""


def _defaults(made: Any) -> str:  # noqa: ANN401
    options = [p for p in inspect.signature(made).parameters.values() if p.name != "self"]
    return ", ".join(f"{p.name}={p.default}" for p in options)


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
