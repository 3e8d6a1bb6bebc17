"""Compare the files of runs, exports, packs and comparisons with their content hashes; nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fednorms.core.errors import BadInput, FednormsError
from fednorms.core.paths import given_path
from fednorms.data.packed import check_pack, is_pack
from fednorms.runs.recipe import Recipe
from fednorms.runs.store import predictions
from fednorms.runs.store.checkpoint import newest_extra, verified
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.store.links import refuse_links
from fednorms.runs.store.seal import KEY, check_tensors, has_seal, hash_of_file, unsealed
from fednorms.runs.toml import loads
from fednorms.runs.use.load import ABOUT

State = Literal["intact", "damaged", "not covered"]
_Found = Iterator[tuple[Path, State, str]]


@dataclass(frozen=True)
class FileState:
    """A file, whether it is as it was written, and why not."""

    path: Path
    state: State
    why: str = ""


@dataclass(frozen=True)
class Verified:
    """What `verify` found, file by file.

    >>> Verified(Path("run"), [FileState(Path("run/recipe.toml"), "intact")]).damaged
    []
    """

    path: Path
    files: list[FileState]

    @property
    def damaged(self) -> list[FileState]:
        """The files that have changed since they were written, or are missing."""
        return [file for file in self.files if file.state == "damaged"]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        files = [{"path": str(f.path), "state": f.state, "why": f.why} for f in self.files]
        return {"path": str(self.path), "damaged": len(self.damaged), "files": files}

    def __repr__(self) -> str:
        order: tuple[State, ...] = ("damaged", "not covered", "intact")
        counts = ", ".join(f"{sum(f.state == s for f in self.files)} {s}" for s in reversed(order))
        lines = [
            f"  {f.state:<12}{_below(f.path, self.path)}" + (f": {f.why}" if f.why else "")
            for state in order
            for f in self.files
            if f.state == state
        ]
        return "\n".join([f"{self.path}: {counts}", *lines])


def verify(path: str | Path) -> Verified:
    """Read every file of a run, an exported model, a comparison or a pack, and compare it with its content hash.

    A file is "intact", "damaged" (changed, cut off or missing), or "not covered": no hash says what it should be, as
    for files of version 0.1 or files that fednorms did not write. Folders are searched for runs, models and packs.

    >>> verify("nowhere")
    Traceback (most recent call last):
    fednorms.BadInput: nowhere: no such file or folder. Name a run, an exported model, a comparison or a pack.
    """
    path = given_path("path", path)
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder. Name a run, an exported model, a comparison or a pack.")
    found: dict[Path, FileState] = {}
    for file, state, why in _in_folder(path) if path.is_dir() else _single(path):
        if file not in found or state == "damaged" or found[file].state == "not covered":
            found[file] = FileState(file, state, why)
    files = [found[name] for name in sorted(found)]
    if all(file.state == "not covered" for file in files) and path.is_dir():
        there = "it is empty" if not files else "no file in it has a content hash"
        raise BadInput(f"Nothing to verify in {path}: {there}. Name a run, an exported model, a comparison or a pack.")
    if not path.is_dir() and files[0].state == "not covered":
        raise BadInput(f"{path} has no content hash. Name a run, an exported model, a comparison or a pack.")
    return Verified(path, files)


def _below(file: Path, root: Path) -> str:
    return str(file.relative_to(root)) if file != root and file.is_relative_to(root) else str(file)


def _in_folder(root: Path) -> _Found:
    for folder, inner, names in os.walk(root):
        here = Path(folder)
        if "recipe.toml" in names and ("metrics.jsonl" in names or "checkpoints" in inner):
            yield from _run(RunDirectory(here))
            yield from ((p, "not covered", "") for p in here.rglob("*") if p.is_file())
            inner.clear()
        elif ABOUT in names:
            yield from _export(here)
            yield from ((here / name, "not covered", "") for name in names)
        else:
            for name in names:
                yield from _single(here / name)


def _single(file: Path) -> _Found:
    if is_pack(file):
        yield _judged(file, lambda: check_pack(file))
    elif file.suffix == ".safetensors":
        data = file.read_bytes()
        try:
            covered = has_seal(data)
        except ValueError as error:
            yield file, "damaged", str(error)
            return
        yield _judged(file, lambda: check_tensors(data)) if covered else (file, "not covered", "")
    else:
        yield file, "not covered", ""


def _judged(file: Path, check: Callable[[], object]) -> tuple[Path, State, str]:
    try:
        check()
    except (FednormsError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return file, "damaged", str(error)
    return file, "intact", ""


def _sealed(file: Path) -> tuple[Path, State, str]:
    """A JSON object that holds its own hash."""
    if not file.exists():
        return file, "damaged", "missing"
    covered = False

    def check() -> None:
        nonlocal covered
        values = json.loads(file.read_bytes())
        covered = KEY in values
        unsealed(values)

    path, state, why = _judged(file, check)
    return (path, "not covered", "written by version 0.1") if state == "intact" and not covered else (path, state, why)


def _run(run: RunDirectory) -> _Found:
    try:
        refuse_links(run.path)
    except BadInput as error:
        yield run.path, "damaged", str(error)
        return
    yield from ((file, "damaged" if why else "intact", why) for file, why in verified(run.checkpoints))
    for file in predictions.files(run):
        yield from _single(file)
    extra = newest_extra(run.checkpoints)
    mark = extra[1].get("metrics") if extra else None
    if run.facts_path.exists() or mark:  # early runs of version 0.1 have none
        yield _sealed(run.facts_path)
    ended = None
    if run.summary_path.exists():
        yield (summary := _sealed(run.summary_path))
        ended = run.summary() if summary[1] != "damaged" else None
    if extra and "recipe" in extra[1]:
        changed = run.changed_recipe(extra[1]["recipe"]) if run.recipe.exists() else ["missing"]
        yield run.recipe, "damaged" if changed else "intact", "".join(changed)
    else:
        yield _recipe(run, ended)
    if mark:
        missing = not run.metrics_path.exists()
        found = _judged(run.metrics_path, lambda: run.check_metrics(mark))
        yield (run.metrics_path, "damaged", "missing") if missing else found
    if ended and extra and extra[0] < int(ended.get("rounds", 0)):
        manifest = run.checkpoints / f"round-{int(ended['rounds']):06d}" / "manifest.json"
        yield manifest, "damaged", "missing, although the run has ended"
    if extra and extra[1].get("best") and not (run.checkpoints / "best" / "manifest.json").exists():
        yield run.checkpoints / "best" / "manifest.json", "damaged", "missing"


def _recipe(run: RunDirectory, ended: dict[str, Any] | None) -> tuple[Path, State, str]:
    """The recipe, compared with the copy that a finished run has in its summary."""
    file, state, why = _judged(run.recipe, lambda: loads(run.read_recipe(), run.recipe.name))
    if state == "damaged" or ended is None:
        return file, "damaged" if state == "damaged" else "not covered", why
    told = loads(run.read_recipe(), run.recipe.name)
    if told.get("own_parts"):
        return file, "not covered", "its method has custom parts"
    try:
        same = Recipe.make(told) == Recipe.make(ended["recipe"])
    except (BadInput, KeyError) as error:
        return file, "damaged", str(error)
    return (file, "intact", "") if same else (file, "damaged", "it is not the recipe that the finished run had")


def _export(folder: Path) -> _Found:
    about = _sealed(folder / ABOUT)
    yield about
    if about[1] == "intact":
        for name, expected in json.loads((folder / ABOUT).read_bytes()).get("files", {}).items():
            file = folder / Path(name).name
            if not file.exists():
                yield file, "damaged", "missing"
            else:
                same = hash_of_file(file) == expected
                yield file, "intact" if same else "damaged", "" if same else "its content hash differs"
