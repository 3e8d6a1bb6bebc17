"""The Markdown page next to a table: its notes, and sections that explain a difference from the paper by numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Explanation:
    """A section of its own: a small table, and sentences about it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def notes_in(page: Path) -> list[str]:
    """The items of all lists, one note each, but not those that belong to an explanation."""
    return [note for _, text in _parts(page) if not _cells(text) for note in _items(text)]


def explanations_in(page: Path) -> list[Explanation]:
    """The sections that have a table."""
    found = [(title, _cells(text), _items(text)) for title, text in _parts(page)]
    return [Explanation(title, cells[0], cells[2:], notes) for title, cells, notes in found if cells]


def _parts(page: Path) -> Iterator[tuple[str, str]]:
    """The headings of a page with the text below each; nothing if there is no such page."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE):
        title, _, below = part.partition("\n")
        yield title.strip(), below


def _items(text: str) -> list[str]:
    r"""The items of the lists in a text, each in one line.

    >>> _items("No item.\n\n- First\n  and more.\n- Second.\n")
    ['First and more.', 'Second.']
    """
    _, *items = f"\n{text}".split("\n- ")
    return [" ".join(item.split()) for item in items]


def _cells(text: str) -> list[list[str]]:
    r"""The lines of a Markdown table as cells: its header, the line below that, and its rows.

    >>> _cells("Why:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    [['a', 'b'], ['---', '---'], ['1', '2']]
    """
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
