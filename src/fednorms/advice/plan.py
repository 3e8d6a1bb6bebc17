"""The plan of a search, recorded in its folder: the same call continues it, and another question is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.core.paths import given_path
from fednorms.runs.option_names import option
from fednorms.runs.store.atomic import clear_errors, write_atomic

FILE = "plan.json"


@contextmanager
def kept_folder(out: str | Path | None) -> Iterator[Path]:
    """The folder for the runs of an answer: `out`, or one that is removed afterwards."""
    if out is not None:
        yield given_path("out", out)
    else:
        with tempfile.TemporaryDirectory(prefix="fednorms-advice-") as name:
            yield Path(name)


def recorded(folder: Path, asked: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What the folder recorded for this question, or what `make` gives, which is then recorded."""
    now = json.loads(json.dumps(asked))
    try:
        stored: dict[str, Any] = json.loads((folder / FILE).read_bytes())
        then, found = stored["asked"], stored["found"]
    except FileNotFoundError:
        _refuse_others(folder)
        made: dict[str, Any] = json.loads(json.dumps(make()))
        with clear_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FILE, (json.dumps({"asked": now, "found": made}, indent=1) + "\n").encode())
        return made
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / FILE} cannot be read ({error}). Choose another {option('out')}.") from None
    if differs := [key for key in now if then.get(key) != now[key]]:
        recipe = then.get("recipe", {})
        inner = [key for key, value in now["recipe"].items() if recipe.get(key) != value]
        what = ", ".join(dict.fromkeys([*inner, *(key for key in differs if key != "recipe")]))
        raise BadInput(
            f"{folder} holds the answer to another question. These differ: {what}. Choose another {option('out')}."
        )
    return dict(found)


def _refuse_others(folder: Path) -> None:
    others = sorted(p.name for p in folder.iterdir() if not _temporary(p)) if folder.is_dir() else []
    if others:
        raise BadInput(
            f"{folder} is not empty and holds no search (it has {', '.join(others[:3])}). Choose another "
            f"{option('out')}."
        )


def _temporary(path: Path) -> bool:
    """Whether a killed process left this file before it had its name.

    >>> _temporary(Path(".41bc768fad67.tmp")), _temporary(Path("notes.tmp"))
    (True, False)
    """
    return path.name.startswith(".") and path.suffix == ".tmp"
