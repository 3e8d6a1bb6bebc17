"""What `reproduce` would do: per setting its data and runs, and about how long they take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fednorms.papers.tables.preflight import Estimate


@dataclass(frozen=True)
class PlannedSetting:
    """A setting of a table: `finished` of its runs have results, `left` would run, after `search` runs of searches."""

    setting: str
    data: str  # the data set that it needs; "" for embedded data
    root: str  # where it was found; "" if it was not
    rows: int
    rounds: list[int]
    finished: int
    left: int
    search: int

    @property
    def runs_here(self) -> bool:
        """Whether its data are here."""
        return bool(self.root) or not self.data


@dataclass(frozen=True)
class Planned:
    """What a call of `reproduce` would run."""

    heading: str
    out: str
    settings: list[PlannedSetting]
    hardware: str
    jobs: int
    time: Estimate

    @property
    def runs(self) -> int:
        """How many runs would start."""
        return sum(s.left + s.search for s in self.settings if s.runs_here)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        time = {"seconds": self.time.seconds, "estimated_from": self.time.basis}
        return {**asdict(self), "time": time, "runs": self.runs}
