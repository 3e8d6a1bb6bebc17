"""How a client trains between two exchanges: settings, batch plan, clipping and the optimiser's update."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.part import Phase
from fednorms.core.tree import Tree


@dataclass(frozen=True)
class Training:
    """The recipe of local training. The optimiser starts fresh in every round and phase unless momentum is kept.

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
    schedule: Literal["const", "exp", "step", "cosine"] = "const"
    """Learning rate over rounds: const, exp (times `decay` each round), step (x0.1 at 1/2 and 3/4), cosine."""
    decay: float = 0.998
    """Factor per round of the schedule exp."""
    optimiser: Literal["sgd", "adamw"] = "sgd"
    """Local optimiser."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay (decoupled with adamw)."""
    clip: float | None = None
    """Longest gradient, as an L2 norm (default: not clipped)."""
    last: Literal["keep", "drop", "fill"] = "keep"
    """The short last batch of an epoch: keep it, drop it, or fill it up."""
    keep_momentum: bool = False
    """Keep the momentum from round to round instead of starting fresh."""

    def __post_init__(self) -> None:
        limits = [
            ("epochs", self.epochs >= 1, "an integer >= 1"),
            ("steps", self.steps is None or self.steps >= 1, "an integer >= 1, or nothing"),
            ("batch_size", self.batch_size >= 1, "an integer >= 1"),
            ("lr", 0 <= self.lr < math.inf, "a finite number >= 0"),
            ("decay", 0 < self.decay <= 1, "a number > 0 and <= 1"),
            ("momentum", 0 <= self.momentum < 1, "a number >= 0 and < 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number >= 0"),
            ("clip", self.clip is None or self.clip > 0, "a number > 0, or nothing"),
            ("keep_momentum", not self.keep_momentum or self.optimiser == "sgd", "false with adamw"),
        ]
        wrong = [f"{k} must be {want}, got {getattr(self, k)!r}" for k, fine, want in limits if not fine]
        if wrong:
            raise BadInput("Local training: " + "; ".join(wrong) + ".")

    @property
    def without_effect(self) -> list[str]:
        """Settings that were changed and do nothing beside the others, in words.

        >>> Training(decay=0.9).without_effect
        ['decay 0.9 has no effect: the schedule is const']
        """
        unused = [
            ("decay", self.schedule != "exp", f"the schedule is {self.schedule}"),
            ("momentum", self.optimiser == "adamw", "adamw has its own"),
            ("epochs", self.steps is not None, f"a round has {self.steps} steps"),
        ]
        default = {f.name: f.default for f in fields(self)}
        changed = [(k, why) for k, idle, why in unused if idle and getattr(self, k) != default[k]]
        return [f"{k} {getattr(self, k):g} has no effect: {why}" for k, why in changed]

    def rate(self, t: int, rounds: int) -> float:
        """The learning rate of round t of T: const, lr d^t, x0.1 at T/2 and at 3T/4, or half a cosine."""
        if self.schedule == "exp":
            return self.lr * self.decay**t
        if self.schedule == "step":
            return self.lr * 0.1 ** ((t >= rounds // 2) + (t >= 3 * rounds // 4))
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * t / rounds))
        return self.lr


def batch_plan(
    n: int, training: Training, phase: Phase, seed: int, *, needs_two: bool = False
) -> tuple[list[Tensor], int]:
    """Which rows make up each batch of a phase, and how many rows were dropped.

    Every epoch is one permutation cut into batches. The short last one is kept, dropped, or filled up from the start
    of the same permutation; a last batch of one that batch normalisation cannot take is always dropped.

    >>> [len(b) for b in batch_plan(10, Training(batch_size=4), Phase(epochs=2), seed=0)[0]]
    [4, 4, 2, 4, 4, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    size = training.batch_size
    wanted = phase.steps * phase.draws if phase.steps else None
    plan: list[Tensor] = []
    dropped = epoch = 0
    epochs = 0 if wanted else phase.epochs or 1
    least = wanted or phase.draws  # a client with fewer batches than one step draws goes through its data again
    while epoch < epochs or len(plan) < least:
        order = torch.randperm(n, generator=generator)
        batches = list(order.split(size))
        short = len(batches[-1]) < size
        if short and training.last == "drop" and len(batches) > 1:
            dropped += len(batches.pop())
        elif short and training.last == "fill":
            missing = size - len(batches[-1])
            batches[-1] = torch.cat([batches[-1], order.repeat(-(-missing // n))[:missing]])
        if needs_two and len(batches[-1]) == 1:
            dropped += len(batches.pop())
        if not batches:
            break
        plan += batches
        epoch += 1
    return plan[:wanted], dropped


def clipped(g: Tree, clip: float) -> Tree:
    """Scale the whole gradient to norm `clip` if it is longer: g min(1, clip / (|g| + 1e-6)).

    >>> round(float(clipped(Tree(w=torch.tensor([3.0, 4.0])), 1.0).sqnorm()), 4)
    1.0
    """
    if not g:
        return g
    norm = torch.stack(torch._foreach_norm(list(g.values()))).norm()
    return g * (clip / (norm + 1e-6)).clamp(max=1.0)


@dataclass
class Optimiser:
    """SGD or AdamW as a value: moments, number of updates and rate are tensors that a step advances in place."""

    training: Training
    lr: Tensor
    updates: Tensor
    first_moment: Tree
    second_moment: Tree

    @classmethod
    def fresh(cls, training: Training, params: Tree, lr: float, like: Tensor) -> Optimiser:
        """A new optimiser for these parameters, with empty moments."""
        adam = training.optimiser == "adamw"
        return cls(
            training,
            lr=torch.tensor(lr, dtype=like.dtype, device=like.device),
            updates=torch.zeros((), dtype=like.dtype, device=like.device),
            first_moment=params.zeros() if adam or training.momentum else Tree(),
            second_moment=params.zeros() if adam else Tree(),
        )

    def update(self, params: Tree, g: Tree) -> None:
        """Move `params` in place along the gradient; tensors without a gradient stay, weight decay included.

        SGD: v <- rho v + g + wd w; w <- w - lr v. AdamW: decoupled decay, betas (0.9, 0.999), eps 1e-8.
        """
        names = list(g)
        if not names:
            return
        w, grads = [params[k] for k in names], list(g.values())
        if self.training.optimiser == "adamw":
            self._adamw(names, w, grads)
            return
        velocity = [self.first_moment[k] for k in names] if self.training.momentum else []
        if any(t.dtype != torch.float32 for t in (self.lr, *w)):  # the kernel below reads its rate in float32 only
            self._sgd(w, grads, velocity)
            return
        # One pass over everything, in the order of memory: a gradient of another kind is copied first.
        torch._fused_sgd_(
            w,
            [t if _alike(p, t) else torch.empty_like(p).copy_(t) for p, t in zip(w, grads, strict=True)],
            velocity,
            weight_decay=self.training.weight_decay,
            momentum=self.training.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _sgd(self, w: list[Tensor], grads: list[Tensor], velocity: list[Tensor]) -> None:
        if self.training.weight_decay:
            grads = list(torch._foreach_add(grads, w, alpha=self.training.weight_decay))
        if velocity:
            torch._foreach_mul_(velocity, self.training.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        torch._foreach_sub_(w, torch._foreach_mul(grads, self.lr))

    def _adamw(self, names: list[str], w: list[Tensor], grads: list[Tensor]) -> None:
        beta_1, beta_2, eps = 0.9, 0.999, 1e-8
        self.updates += 1
        m, v = [self.first_moment[k] for k in names], [self.second_moment[k] for k in names]
        torch._foreach_mul_(w, 1 - self.lr * self.training.weight_decay)
        torch._foreach_lerp_(m, grads, 1 - beta_1)
        torch._foreach_mul_(v, beta_2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta_2)
        root = torch._foreach_sqrt(torch._foreach_div(v, 1 - beta_2**self.updates))
        torch._foreach_add_(root, eps)
        rate = self.lr / (1 - beta_1**self.updates)
        torch._foreach_sub_(w, torch._foreach_mul(torch._foreach_div(m, root), rate))


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and a.dtype == b.dtype
