"""Tables of a page: numbers aligned right, intervals below them, sorted by a click on a heading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fednorms.evaluation.intervals import Interval
from fednorms.reports.elements import Child, Html, joined, tag
from fednorms.reports.words import between

_COLUMNS = 7  # besides the first: more do not fit a page


@dataclass(frozen=True)
class Cell:
    """A number in a table: its text, the value by which it is sorted, an interval below it, and a mark.

    `mark` is "best" or "bad".
    """

    text: str
    value: float | None = None
    below: str = ""
    mark: str = ""


Row = Sequence[Cell | Child]


def percent(share: Interval | float, mark: str = "") -> Cell:
    """A share in percent, with its interval below it.

    >>> percent(Interval(0.812, 0.78, 0.84)).below, percent(0.812).text, percent(math.nan).text
    ('78.0 to 84.0', '81.2', '-')
    """
    found = share if isinstance(share, Interval) else Interval(share, math.nan, math.nan)
    return Cell(f"{100 * found.value:.1f}", found.value, between(found), mark) if found.defined else Cell("-")


def count(number: float) -> Cell:
    """A number of things.

    >>> count(1200).text
    '1,200'
    """
    return Cell(f"{number:,.0f}", number)


def table(header: Sequence[str], rows: Sequence[Row], *, sort: bool = True) -> Html:
    """A table; columns of `Cell`s are numbers. One with many columns becomes several, each with the first column.

    >>> table(["site", "images"], [["a", count(3)]]).count('class="number"')
    2
    """
    parts = [range(start, min(start + _COLUMNS, len(header))) for start in range(1, len(header), _COLUMNS)]
    return joined(_part(header, rows, [0, *part], sort) for part in parts)


def _part(header: Sequence[str], rows: Sequence[Row], columns: list[int], sort: bool) -> Html:
    numbers = {j for row in rows for j in columns if isinstance(row[j], Cell)}
    heads = [tag("th", header[j], scope="col", class_="number" if j in numbers else None) for j in columns]
    lines = [tag("tr", [_cell(j, row[j]) for j in columns]) for row in rows]
    kind = " ".join(["sortable"] * (sort and len(rows) > 1) + ["wide"] * (len(columns) > 7))
    head = tag("thead", tag("tr", heads)) if any(header) else None
    made = tag("table", head, tag("tbody", lines), class_=kind or None)
    return tag("div", made, class_="scroll")


def _cell(column: int, cell: Cell | Child) -> Html:
    if not isinstance(cell, Cell):
        return tag("td", cell, class_=None if column else "name")
    below = tag("span", cell.below, class_="range") if cell.below else None
    value = None if cell.value is None or math.isnan(cell.value) else f"{cell.value:.9g}"
    return tag("td", tag("b", cell.text), below, class_=f"number {cell.mark}".strip(), data_value=value)
