"""A run's directory as analyses read it: its last state, the rounds that it kept, its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.data import Federation
from fednorms.papers.analysis.subject import Subject
from fednorms.runs.losses import Loss
from fednorms.runs.store.checkpoint import kept_rounds
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.opened import Which, open_run


@dataclass
class Kept:
    """What is left of a run on disk."""

    path: Path
    federation: Federation | None = None
    model: nn.Module | None = None
    loss: Loss | None = None
    device: str | None = None

    @cached_property
    def last(self) -> Subject:
        """The run after its last round."""
        return self._open("last", self.federation)

    def at(self, round: int) -> Subject:
        """The run after a round of which it kept a checkpoint."""
        return self._open(round, self.last.run.session.federation)  # read once

    def _open(self, which: Which, federation: Federation | None) -> Subject:
        return Subject(open_run(self.path, which, federation, self.model, self.loss, self.device))

    def rounds(self) -> Iterator[Subject]:
        """The run after every round that it kept, but the last: what follows that one never happened."""
        usable = [t for t in kept_rounds(RunDirectory(self.path).checkpoints) if t < self.last.run.recipe.rounds]
        if not usable:
            raise BadInput(
                f'Run {self.path} has kept no round but its last. Put keep_checkpoints = "all" in its recipe, and '
                "checkpoint_every = N for a point of the curve every N rounds."
            )
        return map(self.at, usable)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The run's metrics, a row per round."""
        return RunDirectory(self.path).metrics()
