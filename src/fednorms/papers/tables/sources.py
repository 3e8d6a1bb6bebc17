"""The data of a table's settings: which of the given folders each one needs, and what it contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.data.facts import Facts, SiteFacts
from fednorms.data.readers import READERS, recognized
from fednorms.papers.tables.table import Setting, Table
from fednorms.runs.cells import opened
from fednorms.runs.recipe import Recipe


def needs(setting: Setting, table: Table) -> str:
    """The data set that a setting needs as --data; empty if it needs none.

    >>> from fednorms.papers.tables.table import Table
    >>> columns = {"Avg": "mean"}
    >>> table = Table.make({
    ...     "paper": "a", "label": "b", "title": "c",
    ...     "settings": [{"name": "x", "columns": columns, "recipe": {"federation": "pacs"}},
    ...                  {"name": "y", "columns": columns}],
    ...     "rows": [{"name": "FedAvg", "method": "fedavg"}],
    ... })
    >>> [needs(setting, table) for setting in table.settings]
    ['pacs', '']
    """
    name = str(setting.recipe.get("federation", table.recipe.get("federation", "")))
    return name if name in READERS else ""


def find_root(name: str, given: Sequence[Path]) -> Path | None:
    """The folder of a data set: one of those given, or a folder in one of them."""
    for root in given:
        if _is(name, root):
            return root
    for root in given:
        inside = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        named = [p for p in inside if _plain(p.name) == _plain(name)]
        if found := next((p for p in named if _is(name, p)), None) or next((p for p in inside if _is(name, p)), None):
            return found
        if named:  # broken or incomplete: its reader says what is wrong
            return named[0]
    return next((root for root in given if root.is_dir() and _plain(root.name) == _plain(name)), None)


def _is(name: str, root: Path) -> bool:
    return any(reader.name == name for reader, _ in recognized(root))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


@dataclass(frozen=True)
class Source:
    """What a table knows about a setting's data: their facts, and what a stored result says about them."""

    facts: Facts
    stored: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """The hash of the data."""
        return str(self.stored["fingerprint"])

    @property
    def sites(self) -> dict[str, SiteFacts]:
        """The sites by name."""
        return {site.name: site for site in self.facts.sites}

    @property
    def validated(self) -> bool:
        """Whether clients have validation images."""
        return any("val" in site.images for site in self.facts.sites if site.name in self.facts.clients)


def look(recipe: Recipe) -> Source:
    """Open the data of a recipe, which checks them, and return the facts."""
    found = opened(recipe)
    facts = Facts.of(found)
    domains: dict[str, dict[str, int]] = {}
    for site in facts.sites:
        sizes = domains.setdefault(site.domain, {"sites": 0, "train": 0, "val": 0, "test": 0})
        sizes["sites"] += 1
        for split, counts in site.images.items():
            sizes[split] += sum(counts)
    stored = {
        "federation": facts.name,
        "layout": found.source.get("layout", ""),
        "fingerprint": found.fingerprint(),
        "clients": len(facts.clients),
        "unseen": len(facts.unseen),
        "classes": facts.num_classes,
        "shape": list(facts.shape),
        "domains": domains,
        "notes": [str(note) for note in found.source.get("notes", [])],
    }
    return Source(facts, stored)


def check_columns(setting: Setting, source: Source) -> list[str]:
    """Columns that name domains or sites which the data do not have."""
    wrong = {column: s.missing(source.facts.domain_of) for column, s in setting.selectors.items()}
    return [f'setting "{setting.name}", column "{column}": {text}' for column, w in wrong.items() for text in w]


def missing_data(table: Table, settings: Sequence[Setting], given: Sequence[Path]) -> BadInput:
    """The error if no setting has its data."""
    wanted = [READERS[name] for name in dict.fromkeys(needs(s, table) for s in settings) if name]
    where = ", ".join(map(str, given)) or "no --data given"
    lines = [
        f"  {reader.name}: {reader.description}. {reader.published.where} Expected: {reader.expected}."
        for reader in wanted
    ]
    return BadInput(
        f"{table.heading.partition(':')[0]} needs data that were not found ({where}):\n" + "\n".join(lines) + "\n"
        "Give the folder of a data set, or a folder with several, as --data ROOT. `fednorms data check ROOT` says "
        "what a folder contains. Data are not downloaded."
    )
