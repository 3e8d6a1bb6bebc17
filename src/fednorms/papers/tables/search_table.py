"""What searches chose, as tables: a line per row, a column per value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fednorms.papers.tables.explanations import Explanation
from fednorms.papers.tables.search import Search


@dataclass
class Told:
    """The outcome of a table's searches: all in sentences, or many in tables and the others in sentences."""

    sentences: list[str] = field(default_factory=list)
    tables: list[Explanation] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def told(searches: Collection[Search]) -> Told:
    """Searches that have ended share a table if they chose the same value by the same metric in the same setting."""
    begun = [search for search in searches if search.begun]
    groups: dict[tuple[object, ...], list[Search]] = {}
    for search in begun:
        if search.chosen is not None and len(search.row.search) == 1:
            kind = (search.setting.title, *search.row.search, search.metric, len(search.seeds))
            groups.setdefault(kind, []).append(search)
    together = [group for group in groups.values() if len(group) > 1]
    alone = [s for s in begun if not any(s is other for group in together for other in group)]
    several = len({group[0].setting.title for group in together}) > 1
    tables = [_table(group, in_setting=several) for group in together]
    return Told([s.sentence() for s in begun], tables, [s.sentence() for s in alone])


def _table(group: Sequence[Search], *, in_setting: bool) -> Explanation:
    first = group[0]
    key = next(iter(first.row.search))
    name, metric, count = key.rpartition(".")[2], first.metric.replace("_", " "), len(first.seeds)
    values = list(dict.fromkeys(value for search in group for value in search.row.search[key]))
    if all(type(value) in (int, float) for value in values):
        values.sort()
    rows = []
    for search in group:
        scores = {point[key]: mean for point, mean in search.means}
        chosen = search.chosen and search.chosen[key]
        cells = [_cell(scores[value]) if value in scores else "" for value in values]
        cells = [f"{cell} (chosen)" if value == chosen else cell for value, cell in zip(values, cells, strict=True)]
        rows.append([search.row.name, *cells])
    notes = [f"{metric.capitalize()} in percent, {count} seed{'s' * (count > 1)}. No test image takes part."]
    if at_edge := [search.row.name for search in group if search.at_edge]:
        notes.append(f"Chosen at the edge of the grid: {'; '.join(at_edge)}.")
    where = f", {first.setting.title}" if in_setting else ""
    return Explanation(f"How {name} was chosen on validation images{where}", [name, *map(str, values)], rows, notes)


def _cell(mean: float | None) -> str:
    return "diverged" if mean is None else f"{mean:.1f}"
