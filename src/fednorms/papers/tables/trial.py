"""A trial of a table: a few rounds of every row, to see that everything runs. It is marked, and never judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.paths import given_path
from fednorms.papers.tables.plan import found_in
from fednorms.papers.tables.store import ResultStore
from fednorms.papers.tables.table import Row, Table, as_recipe, merged
from fednorms.runs.option_names import flag, option

ROUNDS = 2  # of a trial, unless told otherwise


def rounds_of_trial(rounds: int | None, quick: bool) -> int | None:
    """The rounds of a trial; None if the table is to run in full.

    >>> rounds_of_trial(None, quick=True), rounds_of_trial(5, quick=True), rounds_of_trial(None, quick=False)
    (2, 5, None)
    """
    if rounds is not None and not quick:
        raise BadInput(
            "reproduce: the number of rounds belongs to the table. For a trial, which is not compared with the paper, "
            f"add {flag('quick')}."
        )
    if rounds is not None and rounds < 1:
        raise BadInput(f"reproduce: rounds must be an integer >= 1, got {rounds}.")
    return (rounds or ROUNDS) if quick else None


def trial(table: Table, rounds: int) -> Table:
    """The same table with so many rounds and one seed; searches take their first values, published values are gone."""
    length = counted(rounds, "round")
    marked = f"TRIAL of {length}, not comparable with the paper. {table.title}"
    return table.model_copy(
        update={
            "title": marked,
            "notes": [f"A trial of {length}: it shows that everything runs, and says nothing about the paper."],
            "recipe": table.recipe | {"rounds": rounds},
            "settings": [
                s.model_copy(update={"recipe": _without_rounds(s.recipe), "derived": []}) for s in table.settings
            ],
            "rows": [_tried(table, row) for row in table.rows],
            "averages": {},
            "seeds": 1,
        }
    )


def trial_folder(table: Table, rounds: int, out: str | Path | None) -> Path:
    """Where a trial's results go; a folder with other results is refused, because its report would be replaced."""
    folder = given_path("out", out) if out is not None else Path("runs") / f"trial-{table.name}-{rounds}"
    if others := found_in(ResultStore(folder), trial(table, rounds), {}).stale:
        raise BadInput(
            f"{folder} holds results of other runs ({others[0]}, ...), whose report a trial would replace. "
            f"Choose another {option('out')}."
        )
    return folder


def _tried(table: Table, row: Row) -> Row:
    first = as_recipe({key: grid[0] for key, grid in row.search.items() if key != "rounds"})
    inside = {s.name: merged(_without_rounds(row.at.get(s.name, {})), first) for s in table.settings if row.runs_in(s)}
    nothing: dict[str, Any] = {"published": {}, "averages": {}, "search": {}}
    return row.model_copy(update={"recipe": _without_rounds(row.recipe), "at": inside, **nothing})


def _without_rounds(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key != "rounds"}
