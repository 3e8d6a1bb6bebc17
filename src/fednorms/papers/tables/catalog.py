"""The tables that come with the library: where their files are, what they need, and what has been run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput, FednormsError
from fednorms.core.options import did_you_mean
from fednorms.core.paths import given_path
from fednorms.papers.tables.plan import found_in, pairs
from fednorms.papers.tables.search import open_search
from fednorms.papers.tables.sources import needs
from fednorms.papers.tables.store import RUNS, SEARCHES, ResultStore
from fednorms.papers.tables.table import FILE, Table, as_recipe


def home() -> Path:
    """The folder of the tables that come with the library: in the installed package, or in the repository."""
    package = Path(__file__).resolve().parents[2]
    places = (package / "recipes", package.parents[1] / "recipes")
    return next((place for place in places if place.is_dir()), places[0])


def known() -> list[str]:
    """The names of all tables: by paper, tables before figures, in the papers' order."""
    return sorted((f"{file.parent.name}-{file.stem}" for file in home().glob("*/*.toml")), key=_order)


def file_of(name: str) -> Path:
    """The file of a table that comes with the library: PAPER/table-1.toml for "PAPER-table-1"."""
    paper, _, rest = name.partition("-")
    return home() / paper / f"{rest}.toml"


def open_table(name: str | Path) -> Table:
    """The table of this name, file or folder.

    >>> open_table("no-such-table")
    Traceback (most recent call last):
    fednorms.BadInput: No table "no-such-table": ...
    """
    path = given_path("name", name)
    for file in (path, path / FILE, file_of(str(name))):
        if file.suffix == ".toml" and file.is_file():
            return Table.read(file)
    if path.is_dir():
        raise BadInput(f"{path} is not a table: it has no {FILE}.")
    hint = f"{did_you_mean(str(name), known())}`fednorms reproduce --list` shows all {len(known())}"
    raise BadInput(f'No table "{name}": {hint}. The path of a folder with a {FILE} is a table, too.')


def default_out(table: Table) -> Path:
    """The default output folder: runs/reproduce-NAME."""
    return Path("runs") / f"reproduce-{table.name}"


def _order(name: str) -> tuple[object, ...]:
    """Sort numbers in names as numbers: table-2 before table-11.

    >>> sorted(["a-table-11", "a-table-2", "a-figure-1", "a-appendix-table-3"], key=_order)
    ['a-table-2', 'a-table-11', 'a-figure-1', 'a-appendix-table-3']
    """
    paper, *words = name.split("-")
    appendix = "appendix" in words
    figure = "figure" in words
    return (paper, appendix, figure, *((0, int(w), "") if w.isdigit() else (1, 0, w) for w in words))


@dataclass(frozen=True)
class Listed:
    """A table in the list: `done` of its `runs` have results, among those of the library or under ./runs."""

    name: str
    paper: str
    label: str
    title: str
    data: list[str]
    runs: int
    done: int
    where: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)


def listing() -> list[Listed]:
    """Every table, in the papers' order.

    >>> all(entry.done <= entry.runs for entry in listing())
    True
    """
    return [listed(Table.read(file_of(name))) for name in known()]


def listed(table: Table) -> Listed:
    """One table in the list."""
    data = list(dict.fromkeys(needs(setting, table) or "none" for setting in table.settings))
    runs = len(list(pairs(table))) * table.seeds
    done, where = 0, ""
    for place in (table.results, default_out(table)):
        count = _finished(table, place) if place is not None else 0
        if count > done:
            done, where = count, "recipes" if place == table.results else str(place)
    title = f"{table.title} (analysis: {table.analysis})" if table.analysis else table.title
    return Listed(table.name, table.paper, table.label, title, data, runs, done, where)


def _finished(table: Table, out: Path) -> int:
    store = ResultStore(out)
    if not store.files(RUNS) and not store.files(SEARCHES):
        return 0
    try:
        searches = {(s.name, r.name): open_search(store, table, s, r) for s, r in pairs(table) if r.search}
        chosen = {key: as_recipe(s.chosen) for key, s in searches.items() if s.chosen is not None}
        found = found_in(store, table, chosen)
    except FednormsError:
        return 0  # `reproduce` says which file is broken
    diverged = sum(s.diverged for s in searches.values())  # nothing to run in their rows
    return diverged * table.seeds + sum(int(r["recipe"]["seed"]) < table.seeds for r in found.every)
