"""The settings of local training: how long, in which batches, with which optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Literal

from fednorms.core.errors import BadInput
from fednorms.core.option_names import option
from fednorms.core.options import quoted

SCHEDULES = ("const", "exp", "step", "cosine")
OPTIMIZERS = ("sgd", "adam", "adamw")
CUSTOM = "custom:"  # starts the name of a user's object in a recipe


@dataclass(frozen=True)
class Training:
    """The recipe of local training. The optimizer starts fresh in every round and phase unless momentum is kept.

    >>> Training(lr=0.1, schedule="exp").rate(10, 100) == 0.1 * 0.998**10
    True
    """

    epochs: int = 1
    """Epochs over the client's data in a round."""
    steps: int | None = None
    """Local steps in a round, instead of epochs."""
    batch_size: int = 32
    """Images in a batch."""
    lr: float = 0.05
    """Learning rate of the first round."""
    schedule: str = "const"
    """Learning rate over rounds: const, exp (times `decay` each round), step (x0.1 at 1/2 and 3/4), cosine."""
    decay: float = 0.998
    """Factor per round of the schedule exp."""
    optimizer: str = "sgd"
    """Local optimizer: sgd, adam or adamw."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay: added to the gradient, with adamw decoupled from it."""
    clip: float | None = None
    """Longest gradient, as an L2 norm (default: not clipped)."""
    last: Literal["keep", "drop", "fill"] = "keep"
    """The short last batch of an epoch: keep it, drop it, or fill it up."""
    keep_momentum: bool = False
    """Keep the momentum from round to round instead of starting fresh."""
    warmup: int | None = None
    """Rounds of warm-up: round t of them has t / (warmup + 1) of the schedule's rate (default: none)."""
    client_epochs: Mapping[str, int] | None = None
    """Epochs of single clients, by name; the others take `epochs`."""
    optimiser: InitVar[str | None] = None  # how version 0.1 wrote "optimizer"; for input only

    def __post_init__(self, optimiser: str | None) -> None:
        if optimiser is not None:
            object.__setattr__(self, "optimizer", optimiser)
        numbers = ("epochs", "steps", "batch_size", "lr", "decay", "momentum", "weight_decay", "clip", "warmup")
        if wrong := [k for k in numbers if not isinstance(getattr(self, k), int | float | None)]:
            raise BadInput(
                "; ".join(f"{option(k)} must be a number, got {quoted(getattr(self, k))}" for k in wrong) + "."
            )
        limits = [
            ("epochs", self.epochs >= 1, "an integer >= 1"),
            ("steps", self.steps is None or self.steps >= 1, "an integer >= 1, or nothing"),
            ("batch_size", self.batch_size >= 1, "an integer >= 1"),
            ("lr", 0 <= self.lr < math.inf, "a finite number >= 0"),
            ("decay", 0 < self.decay <= 1, "a number > 0 and <= 1"),
            ("momentum", 0 <= self.momentum < 1, "a number >= 0 and < 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number >= 0"),
            ("clip", self.clip is None or self.clip > 0, "a number > 0, or nothing"),
            ("optimizer", _known(self.optimizer, OPTIMIZERS), "sgd, adam or adamw"),
            ("schedule", _known(self.schedule, SCHEDULES), "const, exp, step or cosine (for a warm-up, set warmup)"),
            ("keep_momentum", not self.keep_momentum or self.optimizer == "sgd", f"false with {self.optimizer}"),
            ("warmup", self.warmup is None or self.warmup >= 1, "an integer >= 1, or nothing"),
            ("client_epochs", all(n >= 1 for n in (self.client_epochs or {}).values()), "integers >= 1 by client"),
        ]
        wrong = [f"{option(k)} must be {want}, got {quoted(getattr(self, k))}" for k, fine, want in limits if not fine]
        if wrong:
            raise BadInput("; ".join(wrong) + ".")

    @property
    def without_effect(self) -> list[str]:
        """Settings that were changed and have no effect with the others, in words.

        >>> Training(decay=0.9).without_effect
        ['decay 0.9 has no effect: the schedule is const']
        """
        unused = [
            ("decay", self.schedule != "exp", f"the schedule is {self.schedule}"),
            ("momentum", self.optimizer in ("adam", "adamw"), f"{self.optimizer} has its own"),
            ("epochs", self.steps is not None, f"a round has {self.steps} steps"),
        ]
        default = {f.name: f.default for f in fields(self)}
        changed = [(k, why) for k, idle, why in unused if idle and getattr(self, k) != default[k]]
        notes = [f"{k} {getattr(self, k):g} has no effect: {why}" for k, why in changed]
        if self.client_epochs and self.steps is not None:
            notes.append(f"epochs of single clients have no effect: a round has {self.steps} steps")
        return notes

    def epochs_of(self, client: str) -> int:
        """The epochs of a client in a round.

        >>> settings = Training(epochs=2, client_epochs={"north": 5})
        >>> settings.epochs_of("north"), settings.epochs_of("south")
        (5, 2)
        """
        return (self.client_epochs or {}).get(client, self.epochs)

    def rate(self, t: int, rounds: int) -> float:
        """The learning rate of round t (from 0) of T: const, lr d^t, x0.1 at T/2 and at 3T/4, or half a cosine.

        In a warm-up of w rounds, the first w are multiplied by 1 / (w + 1), 2 / (w + 1), ...

        >>> [Training(lr=0.5, warmup=3).rate(t, 100) for t in range(5)]
        [0.125, 0.25, 0.375, 0.5, 0.5]
        """
        return self.warmed(t, self.full_rate(t, rounds))

    def warmed(self, t: int, rate: float) -> float:
        """A schedule's rate of round t (from 0), as the warm-up leaves it."""
        return rate * (t + 1) / (self.warmup + 1) if self.warmup and t < self.warmup else rate

    def full_rate(self, t: int, rounds: int) -> float:
        """The learning rate of round t (from 0) without a warm-up."""
        if self.schedule == "exp":
            return self.lr * self.decay**t
        if self.schedule == "step":
            return self.lr * 0.1 ** ((t >= rounds // 2) + (t >= 3 * rounds // 4))
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * t / rounds))
        return self.lr


def _known(name: object, names: tuple[str, ...]) -> bool:
    return name in names or (isinstance(name, str) and name.startswith(CUSTOM))
