"""Plan: which runs a table consists of, and which of them are finished, here or in another table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.options import nearest
from fednorms.papers.tables.record import Values, same_run, tested_alike
from fednorms.papers.tables.store import ResultStore, read_records
from fednorms.papers.tables.table import Row, Setting, Table, merged
from fednorms.runs.recipe import Recipe

PARTS = 5  # checkpoints per run, and tests if only the last one is reported


@dataclass(frozen=True)
class Job:
    """A run of a table: one row in one setting with one seed."""

    setting: Setting
    row: Row
    recipe: Recipe

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.recipe.seed

    @property
    def label(self) -> str:
        """Its name in progress reports."""
        return f"{self.setting.name} / {self.row.name}"


def recipe_for(table: Table, setting: Setting, row: Row, seed: int, chosen: Mapping[str, Any]) -> Recipe:
    """The recipe of a run; `chosen` are the searched values.

    Without a curve only the last round is reported, so a run is tested a few times and not after every round. The round
    with the best validation accuracy is still found and recorded, except where rounds are timed.
    """
    split = {"data": {"seed": seed}} if setting.split_per_seed else {}
    recipe = table.recipe_of(setting, row, merged({"seed": seed, **split}, chosen))
    every = ceil(recipe.rounds / PARTS)
    all_rounds = setting.keeps_curve or table.selection == "best-val"
    sparing: dict[str, Any] = {"checkpoint_every": every, "evaluate_every": 1 if all_rounds else every}
    timed = any(selector.kind == "seconds" for selector in setting.selectors.values())
    sparing["validate_every"] = None if all_rounds or timed else 1
    if "rounds" in setting.store:
        sparing["keep_checkpoints"] = "all"
    elif not setting.keeps_run and not table.analysis:  # only scores are stored: the best model would never be read
        sparing["keep_checkpoints"] = "resume"
    return recipe.model_copy(update={k: v for k, v in sparing.items() if k not in recipe.model_fields_set})


@dataclass
class Found:
    """The results of a table in an output folder."""

    done: dict[tuple[str, str], list[Values]] = field(default_factory=dict)  # by setting and row
    failed: dict[tuple[str, str], list[Values]] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)  # of another recipe
    foreign: list[str] = field(default_factory=list)  # made with other data

    def records(self, setting: Setting, row: Row) -> list[Values]:
        """The finished or diverged runs of a row in a setting, by seed."""
        return self.done.get((setting.name, row.name), [])

    @property
    def every(self) -> list[Values]:
        """All finished runs."""
        return [record for records in self.done.values() for record in records]


def found_in(
    store: ResultStore,
    table: Table,
    chosen: Mapping[tuple[str, str], Mapping[str, Any]],
    fingerprint: Callable[[Setting, Recipe], str | None] = lambda setting, recipe: None,
) -> Found:
    """Read the results of a table; those of another recipe or of other data are listed and not used.

    `fingerprint` gives that of a setting's data, or None if the data are not available.
    """
    found, stored = Found(), store.runs()
    for setting, row in pairs(table):
        key = (setting.name, row.name)
        for values in stored.get((setting.slug, row.slug), []):
            recipe, seed = None, int(values["recipe"]["seed"])
            name = f"{setting.slug}/{row.slug}/seed-{seed}"
            if not row.search or key in chosen:
                recipe = recipe_for(table, setting, row, seed, chosen.get(key, {}))
            tests = counts_tests(table, setting)
            if (
                recipe is None
                or not same_run(values["recipe"], recipe)
                or (tests and not tested_alike(values["recipe"], recipe))
            ):
                found.stale.append(name)
            elif (here := fingerprint(setting, recipe)) and here != values["recipe"]["fingerprint"]:
                found.foreign.append(name)
            elif values["status"] == "failed":
                found.failed.setdefault(key, []).append(values)
            elif setting.keeps_curve and values["status"] == "done" and "curve" not in values:
                found.stale.append(name)
            else:
                found.done.setdefault(key, []).append(values)
    return found


def counts_tests(table: Table, setting: Setting) -> bool:
    """Whether it matters after which rounds a run was tested: one of them is chosen, or all are shown."""
    return table.selection == "best-val" or setting.keeps_curve


def pairs(table: Table, settings: Sequence[Setting] = (), rows: Sequence[Row] = ()) -> Iterator[tuple[Setting, Row]]:
    """Every row with each of its settings."""
    for setting in settings or table.settings:
        for row in rows or table.rows:
            if row.runs_in(setting):
                yield setting, row


def chosen_settings(table: Table, names: Sequence[str]) -> list[Setting]:
    """The settings of these names, in the table's order (none: all)."""
    return _named(table, "setting", table.settings, names)


def chosen_rows(table: Table, names: Sequence[str]) -> list[Row]:
    """The rows of these names, in the table's order (none: all)."""
    return _named(table, "row", table.rows, names)


def _named(table: Table, what: str, entries: Sequence[Any], names: Sequence[str]) -> list[Any]:
    wanted = set()
    for name in names:
        same = [e.name for e in entries if name.lower() in (e.name.lower(), e.slug)]
        if not same:
            known = [e.name for e in entries]
            raise BadInput(f'{table.name} has no {what} "{name}": {nearest(name, known)}')
        wanted |= set(same)
    return [e for e in entries if not names or e.name in wanted]


# What a report reads of a run that it takes over from another table.
_NEEDED = {"table", "setting", "row", "status", "recipe", "hardware", "jobs", "data", "date", "version", "torch"}
_OF_SCORES = {"headline", "last", "best", "bytes", "seconds"}


class OtherTables:
    """The finished runs of other tables, in the output folders next to one.

    A run is the same if its recipe and its data are. How often it was tested matters only to a table that needs every
    round. Files that cannot be used are listed in `broken` and left out.
    """

    def __init__(self, out: Path) -> None:
        self.known: dict[tuple[str, str], list[Values]] = {}  # by seed and method
        self.broken: list[str] = []
        here = out.resolve()
        for folder in sorted(here.parent.iterdir()) if here.parent.is_dir() else []:
            for file in ResultStore(folder).files() if folder != here else []:
                self._read(file, str(file.relative_to(here.parent)))

    def _read(self, file: Path, name: str) -> None:
        try:
            records = read_records(file)
        except RunFailed:
            records = [{}]
        for values in records:
            if not _is_complete(values):
                self.broken += [name] if name not in self.broken else []
            elif values["status"] in ("done", "diverged"):
                key = str(values["recipe"]["seed"]), str(values["recipe"]["method"])
                self.known.setdefault(key, []).append(values)

    def find(self, recipe: Recipe, *, curve: bool, same_tests: bool, about: Mapping[str, Any]) -> Values | None:
        """Another table's record of this run, under the name that `about` gives it; None if there is none."""
        for values in self.known.get((str(recipe.seed), recipe.method), []):
            stored = values["recipe"]
            same = stored["fingerprint"] == recipe.fingerprint and same_run(stored, recipe)
            tested = not same_tests or tested_alike(stored, recipe)
            if same and tested and (not curve or "curve" in values or values["status"] == "diverged"):
                origin = " / ".join(str(values[k]) for k in ("table", "setting", "row"))
                shared = {k: v for k, v in values.items() if k != "analysis"}  # an analysis belongs to its table
                return {**shared, **about, "from": values.get("from", origin)}
        return None


def _is_complete(values: Values) -> bool:
    """Whether a record has everything that another table's report needs."""
    needed = _NEEDED | _OF_SCORES if values.get("status") == "done" else _NEEDED
    return needed <= set(values)
