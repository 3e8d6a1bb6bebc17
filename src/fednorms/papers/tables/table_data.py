"""The data sets of a table on this machine: where they are, and each setting's recipe with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednorms.papers.tables.sources import Source, find_root, needs
from fednorms.papers.tables.sources import look as look_at
from fednorms.papers.tables.table import Setting, Table
from fednorms.runs.recipe import Recipe

Fingerprint = Callable[[Setting, Recipe], str | None]


@dataclass
class TableData:
    """The data of a table's settings, as far as they are in the given folders."""

    table: Table
    settings: list[Setting]
    given: list[Path]
    device: str
    reading: dict[str, bool]
    skipped: dict[str, str] = field(default_factory=dict)  # by setting: the data set that is missing
    roots: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)

    def look(self) -> None:
        """Find the data sets, and skip settings without theirs."""
        wanted = list(dict.fromkeys(name for s in self.settings if (name := needs(s, self.table))))
        for name in wanted:
            root = find_root(name, self.given)
            if root is None and len(wanted) == len(self.given) == 1:
                root = self.given[0]  # its reader says what is wrong with it
            if root is not None:
                self.roots[name] = str(root.resolve())
        for setting in self.settings:
            if (name := needs(setting, self.table)) and name not in self.roots:
                self.skipped[setting.name] = name

    def here(self, setting: Setting, recipe: Recipe) -> Recipe:
        """A recipe with the data and the device of this call."""
        name = needs(setting, self.table)
        reading: dict[str, Any] = self.reading | {"root": self.roots[name]} if name else {}
        if not recipe.data.complete:  # the table itself is about a part of the data set
            reading["complete"] = False
        data = recipe.data.model_copy(update=reading)
        return recipe.model_copy(update={"data": data, "device": self.device}).resolved()

    def final(self, setting: Setting, recipe: Recipe) -> Recipe:
        """A recipe as it runs here, with the protocol and the fingerprint of its data."""
        here = self.here(setting, recipe)
        source = self.source(here)
        adopted = here.adopting(source.facts.protocol)
        return adopted.model_copy(update={"fingerprint": source.fingerprint})

    def fingerprint(self, setting: Setting, recipe: Recipe) -> str | None:
        """The fingerprint of a setting's data; None if the data are missing or the setting was not asked for."""
        return self.final(setting, recipe).fingerprint if self.at_hand(setting) else None

    def seen_fingerprint(self, setting: Setting, recipe: Recipe) -> str | None:
        """The same for data that are open already, because nothing more is opened after Ctrl-C."""
        source = self.sources.get(_key(self.here(setting, recipe))) if self.at_hand(setting) else None
        return None if source is None else source.fingerprint

    def at_hand(self, setting: Setting) -> bool:
        """Whether a setting was asked for and its data are here."""
        name = needs(setting, self.table)
        return any(setting.name == s.name for s in self.settings) and (not name or name in self.roots)

    def source(self, recipe: Recipe) -> Source:
        """The data of a recipe, opened once."""
        key = _key(recipe)
        if key not in self.sources:
            self.sources[key] = look_at(recipe)
        return self.sources[key]


def _key(recipe: Recipe) -> str:
    return recipe.federation + recipe.data.model_copy(update={"augment": "auto"}).model_dump_json()
