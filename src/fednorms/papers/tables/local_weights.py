"""Start the models of a table from weights in local files, where the published ones cannot be downloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.core.option_names import option
from fednorms.core.options import nearest
from fednorms.core.paths import given_path
from fednorms.papers.tables.table import Table, merged


def read_weights(given: Sequence[str] | Mapping[str, str | Path]) -> dict[str, Path]:
    """Files by model, from a mapping or from texts MODEL=FILE.

    >>> read_weights(["timm:resnet18=w.pt"])
    Traceback (most recent call last):
    fednorms.BadInput: weights= "timm:resnet18=w.pt": no file "w.pt".
    """
    found: dict[str, Path] = {}
    pairs = given.items() if isinstance(given, Mapping) else [text.partition("=")[::2] for text in given]
    for model, file in pairs:
        where = f'{option("weights")} "{model}={file}"'
        if not model or not str(file):
            raise BadInput(f"{where}: expected MODEL=FILE, such as torchvision:resnet18=resnet18.safetensors.")
        path = given_path("weights", file)
        if not path.is_file():
            raise BadInput(f'{where}: no file "{file}".')
        found[model] = path.resolve()
    return found


def with_weights(table: Table, weights: Mapping[str, Path]) -> Table:
    """The same table, in which these models start from these files instead of downloaded weights; a note says so.

    Runs from scratch stay from scratch if other runs of the table use pretrained weights of that model.
    """
    if not weights:
        return table
    recipes = [table.recipe_of(s, row, {}) for row in table.rows for s in table.settings if row.runs_in(s)]
    models = dict.fromkeys(recipe.model for recipe in recipes)
    downloaded = {recipe.model for recipe in recipes if recipe.pretrained}
    rows = []
    for row in table.rows:
        inside = dict(row.at)
        for setting in table.settings:
            if not row.runs_in(setting):
                continue
            recipe = table.recipe_of(setting, row, {})
            model = recipe.model
            if model in weights and (recipe.pretrained or model not in downloaded):
                start = {"weights": str(weights[model]), "pretrained": False}
                inside[setting.name] = merged(inside.get(setting.name, {}), start)
        rows.append(row.model_copy(update={"at": inside}))
    if unknown := [name for name in weights if name not in models]:
        raise BadInput(f'The table has no model "{unknown[0]}": {nearest(unknown[0], models)}.')
    notes = [f"{model} starts from the local file {file.name}." for model, file in weights.items()]
    return table.model_copy(update={"rows": rows, "notes": [*table.notes, *notes]})


def named(weights: str) -> str:
    """How a result names a file of weights: by its name and a hash of its content, without its folder.

    >>> named("model.pt@0123"), named("")
    ('model.pt@0123', '')
    """
    path = Path(weights)
    return f"{path.name}@{_hash(path, path.stat().st_mtime_ns)}" if weights and path.is_file() else weights


@lru_cache(maxsize=16)
def _hash(path: Path, _changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
