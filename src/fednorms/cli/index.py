"""What `fednorms list` shows, stored in index.json: reading it takes no torch. `make index` writes it.

Methods, models and federations of other packages are not in it; `list` asks the registries for these.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("index.json")
Rows = list[dict[str, str]]


@cache
def index() -> dict[str, Any]:
    """The stored index.

    >>> index()["methods"][0]["name"], "fedprox" in index()["parameters"]["mu"]
    ('adabn', True)
    """
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def collected() -> dict[str, Any]:
    """The index as it follows from the code; measures all methods, which takes some seconds."""
    from fednorms.explain.overview import COLUMNS, overview

    ours = [(entry, facts) for entry, facts in overview() if is_ours(entry.name)]
    return {
        "methods": [{**vars(entry), **facts} for entry, facts in ours],
        "columns": {title: meaning for title, (meaning, _) in COLUMNS.items()},
        "parameters": _parameters([entry.name for entry, _ in ours]),
        "papers": _papers(),
        "models": _models(),
        "federations": _federations(),
        "partitions": _partitions(),
        "transforms": _transforms(),
        "analyses": _analyses(),
    }


def is_ours(method: str) -> bool:
    """Whether a method is of this package."""
    from fednorms.core.part import REGISTRY, SUMS

    made = SUMS.get(method) or REGISTRY.get(method)
    return made is None or made.__module__.startswith("fednorms.")


def _parameters(methods: list[str]) -> dict[str, list[str]]:
    """The methods that have a parameter, by its name."""
    import inspect

    from fednorms.core.part import REGISTRY, SUMS

    found: dict[str, list[str]] = {}
    for name in methods:
        if made := SUMS.get(name) or REGISTRY.get(name):
            for parameter in inspect.signature(made).parameters:
                found.setdefault(parameter, []).append(name)
    return dict(sorted(found.items()))


def _papers() -> dict[str, list[str]]:
    """The methods in the tables of each paper."""
    from fednorms.papers.tables.catalog import home

    found: dict[str, set[str]] = {}
    for file in sorted(home().glob("*/*.toml")):
        if file.parent.name == "beyond":  # our own tables
            continue
        rows = tomllib.loads(file.read_text(encoding="utf-8")).get("rows", [])
        names = {name for row in rows for name in re.findall(r"(?:^|\+)\s*([a-z]\w*)", row["method"])}
        found.setdefault(file.parent.name, set()).update(names)
    return {paper: sorted(names) for paper, names in found.items()}


def _models() -> Rows:
    from fednorms.models import models

    sizes = {m.name: f"{m.size}{' (any)' if m.any_size else ''}" for m in models().values()}
    return [{"name": m.name, "what it is": m.description, "pixels": sizes[m.name]} for m in models().values()]


def _federations() -> Rows:
    from fednorms.data.registry import federations

    return [{"name": name, "what it is": what} for name, what in federations().items()]


def _partitions() -> Rows:
    from fednorms.data.rules import RULES, rules

    rows = []
    for name, what in rules().items():
        options = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(RULES[name]))  # type: ignore[arg-type]
        rows.append({"name": name, "what it does": what, "options": options})
    what = "a partition written by `Partition.save`, checked by its hash"
    return [*rows, {"name": "file:PATH", "what it does": what, "options": ""}]


def _transforms() -> Rows:
    from fednorms.transforms import CHAINS

    return [{"name": name, "what it does": (chain.__doc__ or "").strip()} for name, chain in CHAINS.items()]


def _analyses() -> Rows:
    from fednorms.papers.analysis.measures import ANALYSES

    return [{"name": a.name, "of": a.figures, "what it measures": a.says} for a in ANALYSES.values()]


def text() -> str:
    """The file's text, as it follows from the code."""
    return json.dumps(collected(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
