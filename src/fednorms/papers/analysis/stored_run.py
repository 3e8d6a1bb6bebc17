"""A run's directory as analyses read it: its last state, its stored rounds, its scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.data import Federation
from fednorms.evaluation.scores import Scores
from fednorms.papers.analysis.subject import Subject
from fednorms.runs.losses import Loss
from fednorms.runs.store.checkpoint import kept_rounds
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.open import Which, open_run


@dataclass
class StoredRun:
    """A finished run on disk."""

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
        """The run after a round with a stored checkpoint."""
        return self._open(round, self.last.run.session.federation)  # which is read only once

    def _open(self, which: Which, federation: Federation | None) -> Subject:
        return Subject(open_run(self.path, which, federation, self.model, self.loss, self.device))

    def rounds(self) -> Iterator[Subject]:
        """The run after every stored round except the last, which has no next round."""
        usable = [t for t in kept_rounds(RunDirectory(self.path).checkpoints) if t < self.last.run.recipe.rounds]
        if not usable:
            raise BadInput(
                f'Run {self.path} has stored only its last round. Set keep_checkpoints = "all" in its recipe, and '
                "checkpoint_every = N for a point of the curve every N rounds."
            )
        return map(self.at, usable)

    @cached_property
    def scores(self) -> dict[int, dict[str, Scores]]:
        """The recorded scores of every round, by mode and split ("global/batch/test"); models are not needed."""
        directory = RunDirectory(self.path)
        facts = directory.read_facts()
        domain_of = facts.domain_of if facts else {}  # a run of an early version does not say
        return {int(row["round"]): Scores.in_row(row, domain_of) for row in directory.metrics()}
