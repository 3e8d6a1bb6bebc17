"""The page of recipe keys, from the classes that read a recipe. Made when the site is built."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import griffe

from fednorms import Recipe, Training
from fednorms.runs.recipe import Data

HEAD = """\
# Recipe keys

A recipe is a TOML file with everything that determines a run. Every run writes a complete one to `RUN/recipe.toml`, and
`fednorms run recipe.toml` repeats it. All keys are optional. In Python they are arguments of
[`fn.run`](api/training.md#fednorms.run); on the command line they are options with dashes (`--evaluate-every`).

```toml
method = "scaffold + fedfn"
federation = "digits-shift"
rounds = 20

[training]
lr = 0.1
```
"""
TABLES: dict[str, tuple[str, type]] = {
    "": ("The run", Recipe),
    "training": ("How a client trains", Training),
    "data": ("Which images, and how they are split", Data),
}


def page() -> str:
    """The text of the page."""
    lines = [HEAD]
    for table, (title, cls) in TABLES.items():
        lines += [f"## {title}{f' · `[{table}]`' if table else ''}", "", "| key | type | default | meaning |"]
        lines += ["| --- | --- | --- | --- |", *_rows(cls), ""]
    return "\n".join(lines)


def _rows(cls: type) -> list[str]:
    sources = _sources(cls)
    rows = []
    for name, default in _defaults(cls).items():
        if name not in TABLES:
            read = sources.members[name]
            meaning = " ".join(read.docstring.value.split()) if read.docstring else ""
            rows.append([f"`{name}`", _type(str(read.annotation)), _shown(default), meaning.replace("|", "\\|")])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _defaults(cls: type) -> dict[str, Any]:
    """The keys of a class, with their defaults."""
    made = cls()
    names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(cls.model_fields)  # type: ignore[attr-defined]
    return {name: getattr(made, name) for name in names}


def _sources(cls: type) -> griffe.Object:
    """The sources of a class: only they have the text below each key."""
    file = inspect.getsourcefile(cls)
    assert file
    found = griffe.visit(cls.__module__, filepath=Path(file), code=Path(file).read_text(encoding="utf-8"))[cls.__name__]
    assert isinstance(found, griffe.Object)
    return found


def _type(annotation: str) -> str:
    """A type in words that a recipe's writer knows.

    >>> _type("list[float] | Literal['auto', 'none'] | None")
    '`list[float]`, `"auto"`, `"none"`'
    """
    literals = re.sub(r"Literal\[([^\]]*)\]", lambda found: found[1].replace(", ", " | ").replace("'", '"'), annotation)
    return ", ".join(f"`{kind}`" for kind in literals.split(" | ") if kind != "None")


def _shown(default: object) -> str:
    return "" if default in (None, "", [], {}) else f"`{default}`"
