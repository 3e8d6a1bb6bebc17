"""A run's directory as analyses read it: its last state, its stored rounds, its scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.data import Federation
from fednorms.evaluation.scores import Scores
from fednorms.papers.analysis.divergence import DEAD
from fednorms.papers.analysis.subject import Subject
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.checkpoint import kept_rounds
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.open import Which, open_run

T = TypeVar("T")


@dataclass
class StoredRun:
    """A finished run on disk, and what an analysis may choose: a round, a client, which channels count as constant."""

    path: Path
    federation: Federation | None = None
    model: nn.Module | None = None
    loss: Loss | None = None
    device: str | None = None
    round: int | None = None
    client: str | None = None
    dead: float = DEAD

    @cached_property
    def last(self) -> Subject:
        """The run after its last round."""
        return self._open("last", self.federation)

    @cached_property
    def chosen(self) -> Subject:
        """The run after the chosen round, or after its last one."""
        return self.last if self.round is None else self.at(self.round)

    @cached_property
    def before_end(self) -> Subject:
        """The run before the chosen round, or before the last round that can be trained again."""
        if self.round is not None:
            return self.at(self.round - 1)
        return self.at(self._kept_before_end()[-1])

    def at(self, round: int) -> Subject:
        """The run after a round with a stored checkpoint."""
        return self._open(round, self.last.run.session.federation)  # which is read only once

    def _open(self, which: Which, federation: Federation | None) -> Subject:
        return Subject(open_run(self.path, which, federation, self.model, self.loss, self.device))

    def rounds(self) -> Iterator[Subject]:
        """The run before the chosen round, or after every stored round except the last, which has no next round."""
        return iter([self.before_end]) if self.round is not None else map(self.at, self._kept_before_end())

    def trained(self) -> Iterator[Subject]:
        """The run after every stored round in which clients trained, the last included."""
        kept = [self.round] if self.round is not None else kept_rounds(RunDirectory(self.path).checkpoints)
        return map(self.at, [t for t in kept if t > 0])

    def _kept_before_end(self) -> list[int]:
        kept = [t for t in kept_rounds(RunDirectory(self.path).checkpoints) if t < self.last.run.recipe.rounds]
        if not kept:
            raise BadInput(
                f'Run {self.path} has stored only its last round. Set keep_checkpoints = "all" in its recipe, and '
                "checkpoint_every = N for a point of the curve every N rounds."
            )
        return kept

    def of_client(self, models: Mapping[str, T]) -> Mapping[str, T]:
        """Only the chosen client's, or all."""
        return models if self.client is None else {self.client: models[self._in(models)]}

    def first_clients(self, models: Mapping[str, object], count: int) -> list[str]:
        """The first clients by name, the chosen one before all others."""
        first = [] if self.client is None else [self._in(models)]
        return [*first, *(name for name in sorted(models) if name not in first)][:count]

    def _in(self, models: Mapping[str, object]) -> str:
        assert self.client is not None
        if self.client not in models:
            raise BadInput(f'Client "{self.client}" did not train in this round: {nearest(self.client, models)}')
        return self.client

    @property
    def label(self) -> str:
        """The run in a picture: its method."""
        return Recipe.from_toml(RunDirectory(self.path).read_recipe(), str(self.path)).method

    @cached_property
    def scores(self) -> dict[int, dict[str, Scores]]:
        """The recorded scores of every round, by mode and split ("global/batch/test"); models are not needed."""
        directory = RunDirectory(self.path)
        facts = directory.read_facts()
        domain_of = facts.domain_of if facts else {}  # a run of an early version does not say
        return {int(row["round"]): Scores.in_row(row, domain_of) for row in directory.metrics()}
