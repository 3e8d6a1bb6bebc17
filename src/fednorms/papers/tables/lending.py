"""Runs that several tables have in common: what a table beside this one has finished is taken over, not run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednorms.core.errors import RunFailed
from fednorms.core.options import few
from fednorms.papers.tables.observer import Observer
from fednorms.papers.tables.record import Values, read_record, same_run, tested_alike
from fednorms.runs.recipe import Recipe

# What the report of a table that takes over a run reads of it.
_NEEDED = {"table", "setting", "row", "status", "recipe", "hardware", "jobs", "data", "date", "version", "torch"}
_OF_SCORES = {"headline", "last", "best", "bytes", "seconds"}


class Neighbours:
    """The finished runs in the output folders beside one.

    A run is the same if its recipe and its data are; how often it was tested only matters to those who need every
    round. A file that cannot be read is another table's trouble: it is named and left out.
    """

    def __init__(self, out: Path, observer: Observer) -> None:
        self.known: dict[tuple[str, str], list[Values]] = {}  # by seed and method
        broken: list[str] = []
        beside = out.resolve().parent
        for file in sorted(beside.glob("*/results/*/*/seed-*.json")):
            if file.is_relative_to(out.resolve()):
                continue
            try:
                values = read_record(file)
            except RunFailed:
                values = {}
            if values is None:
                continue
            if not _whole(values):
                broken.append(str(file.relative_to(beside)))
            elif values["status"] in ("done", "diverged"):
                key = str(values["recipe"]["seed"]), str(values["recipe"]["method"])
                self.known.setdefault(key, []).append(values)
        if broken:
            left = f"{len(broken)} results of tables beside this one cannot be read"
            observer.say(f"{left}: not taken over ({few(broken)})")

    def lend(self, recipe: Recipe, *, curve: bool, same_tests: bool, about: Mapping[str, Any]) -> Values | None:
        """A neighbour's record of this run under the name `about` gives it, None if nobody has it."""
        for values in self.known.get((str(recipe.seed), recipe.method), []):
            stored = values["recipe"]
            same = stored["fingerprint"] == recipe.fingerprint and same_run(stored, recipe)
            whole = not same_tests or tested_alike(stored, recipe)
            if same and whole and (not curve or "curve" in values or values["status"] == "diverged"):
                origin = " / ".join(str(values[k]) for k in ("table", "setting", "row"))
                lent = {k: v for k, v in values.items() if k != "analysis"}  # which is that table's own
                return {**lent, **about, "from": values.get("from", origin)}
        return None


def _whole(values: Values) -> bool:
    """Whether a record has all that another table's report needs; `read_record` only asks for what every file has."""
    needed = _NEEDED | _OF_SCORES if values.get("status") == "done" else _NEEDED
    return needed <= set(values)
