"""All tables that come with the library: what they need, how many runs they are, and what has been run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fednorms.core.errors import FednormsError
from fednorms.papers.tables.folders import file_of, known
from fednorms.papers.tables.plan import Shelf, found_in, pairs
from fednorms.papers.tables.reproduce import default_out
from fednorms.papers.tables.search import open_search, tree
from fednorms.papers.tables.sources import needs
from fednorms.papers.tables.table import Table


@dataclass(frozen=True)
class Listed:
    """A table in the list: `done` of its `runs` have results, in the recipe's own folder or under ./runs."""

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
    shelf = Shelf(out)
    if not shelf.results.is_dir() and not shelf.searches.is_dir():
        return 0
    try:
        searches = {(s.name, r.name): open_search(shelf, table, s, r) for s, r in pairs(table) if r.search}
        chosen = {key: tree(s.chosen) for key, s in searches.items() if s.chosen is not None}
        found = found_in(shelf, table, chosen)
    except FednormsError:
        return 0  # broken files: reproducing the table says which
    diverged = sum(s.diverged for s in searches.values())  # whose rows have nothing to run
    return diverged * table.seeds + sum(int(r["recipe"]["seed"]) < table.seeds for r in found.every)
