"""Where tables lie: `recipes/` of an installed package or of the repository, or a folder of the user's."""

from __future__ import annotations

from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.core.options import did_you_mean
from fednorms.papers.tables.table import FILE, Table


def home() -> Path:
    """The folder of the tables that come with the library: inside an installed package, else beside its sources."""
    package = Path(__file__).resolve().parents[2]
    places = (package / "recipes", package.parents[1] / "recipes")
    return next((place for place in places if place.is_dir()), places[0])


def known() -> list[str]:
    """The names of the tables that come with the library, by paper, tables before figures, in the papers' order."""
    return sorted((f"{file.parent.name}-{file.stem}" for file in home().glob("*/*.toml")), key=_order)


def file_of(name: str) -> Path:
    """The file of a table that comes with the library: PAPER/table-1.toml for "PAPER-table-1"."""
    paper, _, rest = name.partition("-")
    return home() / paper / f"{rest}.toml"


def open_table(name: str | Path) -> Table:
    """The table of this name, file or folder.

    >>> open_table("no-such-table")
    Traceback (most recent call last):
    fednorms.BadInput: no table "no-such-table": ...
    """
    path = Path(name).expanduser()
    for file in (path, path / FILE, file_of(str(name))):
        if file.suffix == ".toml" and file.is_file():
            return Table.read(file)
    if path.is_dir():
        raise BadInput(f"{path} is no table: it has no {FILE}")
    hint = f"{did_you_mean(str(name), known())}`fednorms reproduce --list` shows all {len(known())}"
    raise BadInput(f'no table "{name}": {hint}; the path of a folder with a {FILE} is a table, too')


def _order(name: str) -> tuple[object, ...]:
    """Numbers in names as numbers: table-2 before table-11.

    >>> sorted(["a-table-11", "a-table-2", "a-figure-1", "a-appendix-table-3"], key=_order)
    ['a-table-2', 'a-table-11', 'a-figure-1', 'a-appendix-table-3']
    """
    paper, *words = name.split("-")
    appendix = "appendix" in words
    figure = "figure" in words
    return (paper, appendix, figure, *((0, int(w), "") if w.isdigit() else (1, 0, w) for w in words))
