"""The result of `reproduce`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednorms.papers.tables.dry_run import Planned
from fednorms.papers.tables.summary import Summary
from fednorms.papers.tables.table import Table


@dataclass
class Reproduction:
    """A table with everything that has run of it; its repr shows our results next to the published ones."""

    table: Table
    out: Path
    summary: Summary
    ran: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # by setting, the data it needs
    failed: dict[str, str] = field(default_factory=dict)  # by run, why
    files: list[Path] = field(default_factory=list)
    planned: Planned | None = None  # of a dry run

    def __repr__(self) -> str:
        return self.summary.text()

    def _repr_html_(self) -> str:
        return self.summary.html()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "name": self.table.name,
            **self.summary.to_dict(),
            "ran": self.ran,
            "skipped": self.skipped,
            "failed": self.failed,
            "out": str(self.out),
            "files": [str(f) for f in self.files],
        }
