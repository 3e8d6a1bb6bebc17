"""Tables (csv) that describe a data set."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fednorms.core.errors import BadInput
from fednorms.data.folders import EXTENSIONS


def tables_in(place: Path) -> list[Path]:
    """The tables of a folder: csv files, and FLamby's table, which has no suffix."""
    if not place.is_dir():
        return []
    return sorted(
        p for p in place.iterdir() if p.is_file() and (p.suffix.lower() == ".csv" or p.name == "train_test_split")
    )


def columns_of(path: Path) -> list[str]:
    """The names of a table's columns; empty if the file is not a table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file, delimiter=_delimiter(file)), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def read_table(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Read the rows of a table (commas or tabs) and check that it has the needed columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter=_delimiter(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise BadInput(f'Table "{path}" cannot be read: {problem}.') from None
    columns = list(rows[0]) if rows else columns_of(path)
    if missing := [name for name in needed if name not in columns]:
        raise BadInput(f'Table "{path}" has no column {", ".join(missing)}; it has {", ".join(map(str, columns))}.')
    if broken := next((i for i, row in enumerate(rows, 2) if any(row[name] is None for name in needed)), 0):
        raise BadInput(f'Table "{path}", line {broken}: too few entries.')
    return rows


def _delimiter(file: TextIO) -> str:
    """A comma, or a tab if the first line has one."""
    first = file.readline()
    file.seek(0)
    return "\t" if "\t" in first else ","


def whole_number(text: str, column: str) -> int:
    """Convert an entry such as 3 or 3.0 to a whole number.

    >>> whole_number("3.0", "center")
    3
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != value or value != int(value) or value < 0:
        raise BadInput(f'column {column}: expected a whole number, got "{text}".')
    return int(value)


def with_suffix(path: Path) -> Path:
    """The path of an image, with .jpg where a table omits the suffix.

    >>> with_suffix(Path("ISIC_0000001")).name
    'ISIC_0000001.jpg'
    """
    return path if path.suffix.lower() in EXTENSIONS else path.with_name(f"{path.name}.jpg")
