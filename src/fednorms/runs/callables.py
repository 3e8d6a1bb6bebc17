"""Functions of the user for local training: an optimizer, a schedule, and the epochs of each client.

A recipe is text: it records an optimizer and a schedule by name and a hash of their code (`identity.py`), and the
epochs of clients as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from fednorms.core.errors import BadInput
from fednorms.core.optim import MakeOptimizer, made_by, name_of
from fednorms.core.options import nearest
from fednorms.core.training import CUSTOM, Training
from fednorms.data import Federation, OnDemand, Site

Schedule = Callable[[int], float]
"""A function of the round, counted from 1: what multiplies the learning rate."""
Epochs = int | Mapping[str, int] | Callable[[Site], int]
"""Local epochs of all clients, of some by name, or a function of the site."""


@dataclass(frozen=True)
class Callables:
    """The functions among what the user passed; the recipe has the rest."""

    optimizer: MakeOptimizer | None = None
    schedule: Schedule | None = None
    epochs: Callable[[Site], int] | None = None

    @classmethod
    def of(
        cls, optimizer: str | MakeOptimizer | None, schedule: str | Schedule | None, epochs: Epochs | None = None
    ) -> Callables:
        """The functions among these arguments; the others are names and numbers."""
        return cls(
            optimizer if callable(optimizer) else None,
            schedule if callable(schedule) else None,
            epochs if callable(epochs) else None,
        )

    def factors(self, training: Training, rounds: int) -> tuple[float, ...]:
        """What a custom schedule multiplies the learning rate with, in every round.

        >>> Callables(schedule=lambda t: 1 / t).factors(Training(schedule="custom:f@12"), 4)
        (1.0, 0.5, 0.3333333333333333, 0.25)
        """
        if self.schedule is None or not training.schedule.startswith(CUSTOM):
            return ()
        found = []
        for number in range(1, rounds + 1):
            value: object = self.schedule(number)
            factor = float(value) if isinstance(value, int | float) else math.nan
            if not 0 <= factor < math.inf:
                raise BadInput(
                    f'schedule="{name_of(self.schedule)}" must return a finite number >= 0, the factor of lr in a '
                    f"round. For round {number} of {rounds} it returned {value!r}."
                )
            found.append(factor)
        return tuple(found)

    def make_optimizer(self, training: Training) -> MakeOptimizer | None:
        """The custom optimizer, after a trial with the recipe's settings."""
        if self.optimizer is None or not training.optimizer.startswith(CUSTOM):
            return None
        made_by(self.optimizer, training, [torch.zeros(1)], training.lr)
        return self.optimizer

    def with_epochs(self, training: Training, sites: Federation, given: Federation) -> Training:
        """Local training with the epochs of each client as numbers; names of unknown clients are an error.

        `sites` train; `given` is the federation before a part arranged it.
        """
        if self.epochs is not None and isinstance(sites.sites, OnDemand):
            raise BadInput(
                f'epochs= cannot be a function of the site where clients are made on demand, as in "{given.name}": it '
                "would make all of them. Give a number, or a dictionary of some clients."
            )
        if self.epochs is not None:
            return replace(training, client_epochs={s.name: _checked(self.epochs, s) for s in sites.clients})
        known: dict[str, None] = {}
        for name in training.client_epochs or {}:
            if isinstance(sites.sites, OnDemand):
                if name in sites.sites.names:
                    continue
                known = dict.fromkeys(sites.sites.names[:20])
            else:
                known = known or {s.name: None for s in (*sites.clients, *given.clients)}
            if name not in known:
                raise BadInput(
                    f'epochs names the client "{name}", which does not train in federation "{given.name}": '
                    f"{nearest(name, known)}."
                )
        return training


NO_CALLABLES = Callables()


def _checked(epochs: Callable[[Site], int], site: Site) -> int:
    value: object = epochs(site)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(
            f'epochs="{name_of(epochs)}" must return an integer >= 1. For site "{site.name}" it returned {value!r}.'
        )
    return value
