"""Tables that fit their terminal: cells fold between words, then columns are left out, then blocks are stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

GAP = 2  # spaces between columns


class Grid:
    """A table without lines; `grid` makes one. What does not fit the width is treated in this order.

    Columns of words fold between words. Then the columns in `optional` are left out, the first one first, and a line
    names them. Then the columns are cut into blocks, each with the first columns that tell the rows apart.
    """

    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        numbers_from: int | None,
        optional: Sequence[str],
    ) -> None:
        self.header = list(header)
        self.columns = [
            [Text(name, style="bold"), *(Text(c) if isinstance(c, str) else c for c in column)]  # may have [brackets]
            for name, *column in zip(header, *rows, strict=True)
        ]
        self.is_number = [numbers_from is not None and i >= numbers_from for i in range(len(header))]
        self.optional = [name for name in optional if name in header]
        self.labels = self._telling_apart(1 if numbers_from is None else numbers_from)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width
        kept, left_out = list(range(len(self.header))), list[str]()
        for name in self.optional:
            if self._least(kept) <= room:
                break
            kept.remove(self.header.index(name))
            left_out.append(name)
        for n, block in enumerate(self._blocks(kept, room)):
            if n:
                yield Text("")
            yield from self._lines(console, block, room)
        if left_out:
            words = "column does" if len(left_out) == 1 else "columns do"
            yield Text(f"({', '.join(left_out)}: the {words} not fit {room} characters)", style="dim")

    def _telling_apart(self, most: int) -> int:
        """How many of the first columns it takes until no two rows are alike."""
        for n in range(1, most + 1):
            rows = list(zip(*([cell.plain for cell in column] for column in self.columns[:n]), strict=True))
            if len(set(rows)) == len(rows):
                return n
        return 1  # some rows are equal in all of them

    def _natural(self, column: int) -> int:
        return max(cell_len(cell.plain) for cell in self.columns[column])

    def _narrowest(self, column: int) -> int:
        """The width below which words would break; numbers stay in one line."""
        if self.is_number[column]:
            return self._natural(column)
        return max(cell_len(word) for cell in self.columns[column] for word in cell.plain.split(" "))

    def _least(self, columns: Sequence[int]) -> int:
        return sum(map(self._narrowest, columns)) + GAP * (len(columns) - 1)

    def _blocks(self, columns: list[int], room: int) -> list[list[int]]:
        """The columns cut into blocks that fit, each starting with the columns that tell rows apart."""
        labels = [column for column in columns if column < self.labels]
        blocks = [columns[: len(labels) + 1]]
        for column in columns[len(labels) + 1 :]:
            if self._least([*blocks[-1], column]) > room:
                blocks.append(labels)
            blocks[-1] = [*blocks[-1], column]
        return blocks

    def _widths(self, columns: Sequence[int], room: int) -> list[int]:
        """Natural widths; the widest columns of words give way until all fit."""
        widths, least = [self._natural(c) for c in columns], [self._narrowest(c) for c in columns]
        while sum(widths) + GAP * (len(columns) - 1) > room:
            i = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            if widths[i] <= least[i]:  # one word is wider than the terminal
                widths[i] = max(1, widths[i] - (sum(widths) + GAP * (len(columns) - 1) - room))
                break
            widths[i] -= 1
        return widths

    def _lines(self, console: Console, columns: Sequence[int], room: int) -> Iterator[Text]:
        widths = self._widths(columns, room)
        for row in zip(*(self.columns[c] for c in columns), strict=True):
            folded = [cell.wrap(console, width, overflow="fold") for cell, width in zip(row, widths, strict=True)]
            for pieces in zip_longest(*folded):
                line = Text(no_wrap=True, overflow="ignore")
                for column, width, piece in zip(columns, widths, pieces, strict=True):
                    text = Text("") if piece is None else piece
                    space = " " * (width - cell_len(text.plain))
                    line.append_text(Text(space) + text if self.is_number[column] else text + Text(space))
                    line.append(" " * GAP)
                line.rstrip()
                yield line


def grid(
    header: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    numbers_from: int | None = None,
    optional: Sequence[str] = (),
) -> Grid:
    """A table to print; columns from `numbers_from` on are right-aligned numbers.

    >>> narrow = Console(width=24)
    >>> narrow.print(grid(["name", "idea", "link"], [["fedbn", "keep the norms local", "x" * 20]], optional=["link"]))
    name   idea
    fedbn  keep the norms
           local
    (link: the column does not fit 24 characters)
    """
    return Grid(header, rows, numbers_from, optional)
