"""What a step does with its gradient: clipping, and the optimizer as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorms.core.training import Training
from fednorms.core.tree import Tree


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
class Optimizer:
    """SGD or AdamW as a value: moments, number of updates and rate are tensors that a step advances in place."""

    training: Training
    lr: Tensor
    updates: Tensor
    first_moment: Tree
    second_moment: Tree

    @classmethod
    def fresh(cls, training: Training, params: Tree, lr: float, like: Tensor) -> Optimizer:
        """A new optimizer for these parameters, with empty moments."""
        adam = training.optimizer == "adamw"
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
        if self.training.optimizer == "adamw":
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
