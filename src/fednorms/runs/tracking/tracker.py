"""What every tracker does, and what it is told about a run."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednorms.runs.recipe import Recipe
from fednorms.runs.store.atomic import write_atomic

if TYPE_CHECKING:
    from fednorms.evaluation.scores import Scores


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it: a short name, the complete recipe, and its directory (None if it is not stored)."""

    name: str
    recipe: Recipe
    path: Path | None = None
    group: Path | None = None  # the directory of the comparison that it belongs to

    @property
    def home(self) -> Path | None:
        """The directory for a tracker's files."""
        return self.group or self.path

    def known(self, tracker: str) -> str | None:
        """The id under which a tracker has seen this run before it was interrupted."""
        with suppress(OSError, ValueError, AttributeError):
            return None if self._ids is None else json.loads(self._ids.read_bytes()).get(tracker)
        return None

    def remember(self, tracker: str, number: str) -> None:
        """Store a tracker's id of this run: `resume` continues its curves."""
        if self._ids is None:
            return
        known: dict[str, str] = {}
        with suppress(OSError, ValueError):
            known = json.loads(self._ids.read_bytes())
        write_atomic(self._ids, (json.dumps({**known, tracker: number}) + "\n").encode())

    @property
    def _ids(self) -> Path | None:
        return None if self.path is None else self.path / "tracking.json"


class Tracker(ABC):
    """Sends the numbers of one run somewhere; what it raises ends the tracking, never the run."""

    @abstractmethod
    def begin(self, run: TrackedRun, first: int) -> None:
        """Open the run; `first` is the first round that will be logged, above 1 if the run is continued."""

    @abstractmethod
    def log(self, t: int, values: Mapping[str, float]) -> None:
        """Log the numbers of round t, which counts from 1."""

    @abstractmethod
    def end(self, *, finished: bool) -> None:
        """Close the run, which is finished or was cut short."""


def numbers(row: Mapping[str, Any], scores: Mapping[str, Scores]) -> dict[str, float]:
    """The numbers of a round by name: costs and training loss, and of every test the means and each site's accuracy.

    >>> from fednorms.evaluation.scores import Scores, SiteScore
    >>> row = {"train_loss": 0.5, "lr": 0.1, "clients": 2, "diverged": [], "bytes_up": 8, "bytes_down": 9, "seconds": 1}
    >>> tested = Scores("global", "global", "test", {"a": SiteScore(0.75, 0.7, 0.4, 4, [])}, {"a": "a"})
    >>> found = numbers(row, {"global/global/test": tested})
    >>> found["train/loss"], found["global/global/test/site/a"], "epsilon" in found
    (0.5, 0.75, False)
    """
    found: dict[str, float | None] = {
        "train/loss": row["train_loss"],
        "train/lr": row["lr"],
        "train/clients": row["clients"],
        "train/diverged": len(row["diverged"]),
        "cost/bytes_up": row["bytes_up"],
        "cost/bytes_down": row["bytes_down"],
        "cost/seconds": row["seconds"],
        "epsilon": row.get("epsilon"),
    }
    for name, tested in scores.items():
        found |= {
            f"{name}/accuracy": tested.mean,
            f"{name}/balanced_accuracy": tested.balanced_accuracy,
            f"{name}/worst_domain": tested.worst[1],
            f"{name}/loss": tested.loss,
        }
        found |= {f"{name}/site/{site}": score.accuracy for site, score in tested.sites.items()}
    return {name: float(value) for name, value in found.items() if value is not None}
