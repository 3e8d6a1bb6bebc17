"""Runs that several tables have in common: what a table beside this one has finished is taken over, not run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednorms.runs.recipe import Recipe
from fednorms.tables.record import Values, read_record, same_run


class Neighbours:
    """The finished runs in the output folders beside one.

    A run is the same if its recipe and its data are; how often it was tested only matters to those who need every
    round.
    """

    def __init__(self, out: Path) -> None:
        self.known: dict[tuple[int, str], list[Values]] = {}
        for file in sorted(out.resolve().parent.glob("*/results/*/*/seed-*.json")):
            if file.is_relative_to(out.resolve()):
                continue
            values = read_record(file)
            if values is not None and values["status"] in ("done", "diverged"):
                key = int(values["recipe"]["seed"]), str(values["recipe"]["method"])
                self.known.setdefault(key, []).append(values)

    def lend(self, recipe: Recipe, *, curve: bool, same_tests: bool, about: Mapping[str, Any]) -> Values | None:
        """A neighbour's record of this run under the name `about` gives it, None if nobody has it."""
        for values in self.known.get((recipe.seed, recipe.method), []):
            stored = values["recipe"]
            same = stored["fingerprint"] == recipe.fingerprint and same_run(stored, recipe)
            whole = not same_tests or stored["evaluate_every"] == recipe.evaluate_every
            if same and whole and (not curve or "curve" in values or values["status"] == "diverged"):
                origin = " / ".join(str(values[k]) for k in ("table", "setting", "row"))
                return {**values, **about, "from": values.get("from", origin)}
        return None
