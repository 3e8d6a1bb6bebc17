"""The parts common to all readers of published data sets: name, layouts, protocols, and a check of the counts.

Options mean the same in all readers: `root` is the folder of the data set, `protocol` is one of the reader's, `size` is
in pixels (by default the paper's), and `seed` decides what is drawn. `val` and `test` are the fractions of a split that
is drawn; `val` of a reader without it sets training images aside. `complete` fails if image counts differ from the
published ones. `allow_pickle` opens pickled files, with an unpickler that accepts only NumPy arrays. `cache` is the
folder for decoded images (False: none); above `memory_limit` bytes, images stay in the cache on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.core.option_names import option
from fednorms.core.options import nearest
from fednorms.data.changes import with_validation
from fednorms.data.federation import Federation
from fednorms.data.folders import counted_only
from fednorms.data.problems import raise_problems
from fednorms.data.readers.published import NOWHERE, Published
from fednorms.data.sizes import sides


@dataclass(frozen=True)
class Reader:
    """A data set that one call turns into a federation.

    Attributes:
        name: the federation's name in recipes and on the command line.
        description: one line for `fednorms list federations`.
        read: the function `read(root, protocol=...)` that reads it.
        protocols: the divisions that papers use, with one line each; the first is the default.
        layout: which of its layouts a folder has, in words, or None if the folder is not this data set.
        expected: the files that a folder of this data set has, for messages.
        folders: names of the folder that the data set's archive creates.
        published: where to get it.
        square: its images are always squares.
    """

    name: str
    description: str
    read: Callable[..., Federation]
    protocols: Mapping[str, str]
    layout: Callable[[Path], str | None]
    expected: str = ""
    folders: Sequence[str] = ()
    published: Published = NOWHERE
    square: bool = False

    def with_where(self, text: str) -> str:
        """A message that data are missing, with where to get them."""
        return f"{text} {self.published.where}".rstrip()

    def find(self, root: str | Path, protocol: str) -> Path:
        """Check the protocol's name and find the data set's folder: `root` itself, or one folder inside it.

        The archive's own folder is looked for first, then any other, which must be the only one.
        """
        chosen(self.name, protocol, self.protocols)
        root = Path(root).expanduser()
        if not root.is_dir():
            missing = f'Federation "{self.name}": "{root}" is not a folder; expected {self.expected}.'
            raise BadInput(self.with_where(missing))
        for place in (root, *(root / name for name in self.folders)):
            if place.is_dir() and self.layout(place):
                return place
        inside = [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".") and self.layout(p)]
        if len(inside) == 1:
            return inside[0]
        if inside:
            listed = ", ".join(p.name for p in inside)
            raise BadInput(f'Federation "{self.name}": "{root}" holds several copies ({listed}). Name one as the root.')
        there = sorted(p.name + "/" * p.is_dir() for p in root.iterdir() if not p.name.startswith("."))
        holds = ", ".join(there[:6]) + (f" and {len(there) - 6} more" if len(there) > 6 else "") or "nothing"
        raise BadInput(
            self.with_where(
                f'Federation "{self.name}": "{root}" does not hold this data set; expected {self.expected}, '
                f"in ROOT or in one folder inside it. "
                f"The folder holds {holds}."
            )
        )

    def counted(self, root: str | Path, given: Mapping[str, Any]) -> Federation:
        """Read the data set without decoding image files: sites and labels are right, images are one black pixel."""
        known = inspect.signature(self.read).parameters
        with counted_only():
            return self.open(root, {option: value for option, value in given.items() if option in known})

    def open(self, root: str | Path | None, given: Mapping[str, Any]) -> Federation:
        """Read the data set with the options that are not None; an unknown option is an error."""
        if root is None:
            folder = f"{option('root')}{'' if option('root').endswith('=') else ' '}FOLDER"
            missing = f'Federation "{self.name}" needs {folder}, the folder of the data set; nothing is downloaded.'
            raise BadInput(self.with_where(missing))
        options = {option: value for option, value in given.items() if value is not None}
        if "size" in options:
            height, width = sides(options["size"])
            if self.square and height != width:
                raise BadInput(f'Federation "{self.name}" has square images: size must be one number of pixels.')
            options["size"] = height if height == width else (height, width)
        known = [option for option in inspect.signature(self.read).parameters if option != "root"]
        val = None if "val" in known else options.pop("val", None)
        raise_problems(
            f'Federation "{self.name}"',
            [f'it has no option "{option}"; it takes {", ".join(known)}' for option in options if option not in known],
        )
        made = self.read(root, **options)
        return made if val is None else with_validation(made, val, options.get("seed", 0))


def chosen(what: str, protocol: str, known: Mapping[str, Any]) -> str:
    """Check the name of a protocol.

    >>> chosen("pacs", "fedn", {"fednn": 1, "greg": 2})
    Traceback (most recent call last):
    fednorms.BadInput: Federation "pacs" has no protocol "fedn": did you mean "fednn"? Known: fednn, greg.
    """
    if protocol not in known:
        raise BadInput(f'Federation "{what}" has no protocol "{protocol}": {nearest(protocol, known)}.')
    return protocol


def source_of(root: str | Path, protocol: str, seed: int, notes: Sequence[str]) -> dict[str, Any]:
    """The entries that every data set adds to a federation's source.

    >>> source_of("/data/pacs", "greg", 0, [])["protocol"]
    'greg'
    """
    return {"root": str(Path(root).expanduser().resolve()), "protocol": protocol, "seed": seed, "notes": list(notes)}


def deviations(what: str, problems: Sequence[str], complete: bool) -> list[str]:
    """Raise the differences from the published data set, or with `complete=False` return them for the source.

    >>> deviations("pacs", ["photo: 3 images are missing"], complete=False)
    ['photo: 3 images are missing']
    """
    if problems and complete:
        raise_problems(
            f'Federation "{what}" is not as published ({anyway()} reads it anyway; a run records the differences)',
            problems,
        )
    return [Deviation(problem) for problem in problems]


class Deviation(str):
    """A note about a difference from the published data set."""


def anyway() -> str:
    """The option that reads an incomplete data set, in the words of the user's interface."""
    if option("complete") == "complete=":
        return "complete=False, or incomplete=True of reproduce,"
    return "--no-complete, or --incomplete of reproduce,"


def compared(where: str, found: Mapping[str, int], expected: Mapping[str, int], unit: str = "images") -> list[str]:
    """Describe the differences of counts.

    >>> for line in compared("photo", {"dog": 188, "cow": 2}, {"dog": 189, "cat": 3}):
    ...     print(line)
    photo: 1 of 189 images of dog missing (188 found)
    photo: all 3 images of cat missing
    photo: 2 images of cow, which is not part of it
    """
    told = []
    for name, want in expected.items():
        have = found.get(name, 0)
        if have == 0 and want:
            told.append(f"{where}: all {want:,} {unit} of {name} missing")
        elif have < want:
            told.append(f"{where}: {want - have:,} of {want:,} {unit} of {name} missing ({have:,} found)")
        elif have > want:
            told.append(f"{where}: {have - want:,} {unit} of {name} too many ({have:,} found, {want:,} expected)")
    extra = [name for name in found if name not in expected]
    return told + [f"{where}: {found[name]:,} {unit} of {name}, which is not part of it" for name in extra]
