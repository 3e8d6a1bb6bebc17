"""What a step does with its gradient: clipping, and the optimizer as a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.training import CUSTOM, Training
from fednorms.core.tree import Tree

T = TypeVar("T")


class Rate(NamedTuple):
    """How a tensor is trained that parts claim with `lr_factor`: apart from the model, at `factor` times its rate."""

    parts: tuple[str, ...]
    factor: float


Rates = Mapping[str, Rate]
"""By the names of claimed tensors; the others belong to the model."""
ALL_ALIKE: Rates = {}


def clipped(g: Tree, clip: float, rates: Rates = ALL_ALIKE) -> Tree:
    """Scale the whole gradient to norm `clip` if it is longer: g min(1, clip / (|g| + 1e-6)).

    Tensors that the same parts claim have a norm of their own.

    >>> g = Tree(w=torch.tensor([3.0, 4.0]), helper=torch.tensor([0.5]))
    >>> clipped(g, 1.0, {"helper": Rate(("some part",), 5.0)})["helper"]
    tensor([0.5000])
    >>> round(float(clipped(g.pick(["w"]), 1.0).sqnorm()), 4)
    1.0
    """
    if not g:
        return g
    if rates:
        groups = _grouped(g, {name: rate.parts for name, rate in rates.items()}, ())
        alone = [clipped(g.pick(names), clip) for names in groups.values()]
        return Tree({name: t for tree in alone for name, t in tree.items()}).pick(g)
    norm = torch.stack(torch._foreach_norm(list(g.values()))).norm()
    return g * (clip / (norm + 1e-6)).clamp(max=1.0)


MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""A class of torch.optim, or a function of parameters and `lr` that returns an optimizer."""


@dataclass
class Optimizer:
    """SGD, Adam or AdamW as a value: moments, number of updates and rate are tensors that a step advances in place.

    A custom optimizer is an object of torch.optim (`custom`) on the tensors that move.
    """

    training: Training
    lr: Tensor
    updates: Tensor
    first_moment: Tree
    second_moment: Tree
    custom: torch.optim.Optimizer | None = None
    moving: Tree = field(default_factory=Tree)  # of a custom optimizer
    rates: Rates = field(default_factory=dict)

    @classmethod
    def fresh(
        cls,
        training: Training,
        params: Tree,
        lr: float,
        like: Tensor,
        make: MakeOptimizer | None = None,
        rates: Rates = ALL_ALIKE,
    ) -> Optimizer:
        """A new optimizer for these parameters, with empty moments; `make` makes a custom one."""
        if training.optimizer.startswith(CUSTOM):
            if make is None:
                raise BadInput(
                    f'The run was trained with a custom optimizer ("{training.optimizer.removeprefix(CUSTOM)}"), which '
                    "is needed to train on. Only fednorms.run and fednorms.resume take one (optimizer=)."
                )
            rate, moving = torch.tensor(lr, dtype=like.dtype, device=like.device), params if params else Tree()
            groups: list[Any] = [
                {"params": [params[n] for n in names], "lr": lr * factor}
                for factor, names in _by_factor(params, rates).items()
            ]
            made = made_by(make, training, groups if rates else list(params.values()), lr) if params else None
            return cls(training, rate, torch.zeros_like(rate), Tree(), Tree(), made, moving, rates)
        adam = training.optimizer in ("adam", "adamw")
        return cls(
            training,
            lr=torch.tensor(lr, dtype=like.dtype, device=like.device),
            updates=torch.zeros((), dtype=like.dtype, device=like.device),
            first_moment=params.zeros() if adam or training.momentum else Tree(),
            second_moment=params.zeros() if adam else Tree(),
            rates=rates,
        )

    def update(self, params: Tree, g: Tree) -> None:
        """Move `params` in place along the gradient; tensors without a gradient stay, weight decay included.

        SGD: v <- rho v + g + wd w; w <- w - lr v. Adam adds wd w to the gradient, too; AdamW first shrinks w by
        lr wd instead. Both have betas (0.9, 0.999) and eps 1e-8.
        """
        if not g:
            return
        if self.custom is not None:
            for name, tensor in self.moving.items():
                tensor.grad = g[name].to(tensor.dtype) if name in g else None
            self.custom.step()
            return
        if self.training.optimizer != "sgd":
            self.updates += 1
        if not self.rates:
            self._move(params, g, self.lr)
            return
        for factor, names in _by_factor(g, self.rates).items():
            self._move(params, g.pick(names), self.lr * factor)

    def _move(self, params: Tree, g: Tree, lr: Tensor) -> None:
        """Move tensors that have the same rate."""
        names, w, grads = list(g), [params[k] for k in g], list(g.values())
        if self.training.optimizer != "sgd":
            self._adam(names, w, grads, lr)
            return
        velocity = [self.first_moment[k] for k in names] if self.training.momentum else []
        if any(t.dtype != torch.float32 for t in (lr, *w)):  # the kernel below reads its rate in float32 only
            sgd(w, grads, velocity, lr=lr, weight_decay=self.training.weight_decay, momentum=self.training.momentum)
            return
        # One pass over everything, in the order of memory: a gradient of another kind is copied first.
        torch._fused_sgd_(
            w,
            [t if _alike(p, t) else torch.empty_like(p).copy_(t) for p, t in zip(w, grads, strict=True)],
            velocity,
            weight_decay=self.training.weight_decay,
            momentum=self.training.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _adam(self, names: list[str], w: list[Tensor], grads: list[Tensor], lr: Tensor) -> None:
        beta_1, beta_2, eps = 0.9, 0.999, 1e-8
        m, v = [self.first_moment[k] for k in names], [self.second_moment[k] for k in names]
        if self.training.optimizer == "adamw":
            torch._foreach_mul_(w, 1 - lr * self.training.weight_decay)
        elif self.training.weight_decay:
            grads = list(torch._foreach_add(grads, w, alpha=self.training.weight_decay))
        torch._foreach_lerp_(m, grads, 1 - beta_1)
        torch._foreach_mul_(v, beta_2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta_2)
        root = torch._foreach_sqrt(torch._foreach_div(v, 1 - beta_2**self.updates))
        torch._foreach_add_(root, eps)
        rate = lr / (1 - beta_1**self.updates)
        torch._foreach_sub_(w, torch._foreach_mul(torch._foreach_div(m, root), rate))


def sgd(
    w: list[Tensor], grads: list[Tensor], velocity: list[Tensor], *, lr: Tensor, weight_decay: float, momentum: float
) -> None:
    """Stochastic gradient descent in place: v <- rho v + g + wd w; w <- w - lr v. Without velocities, rho is 0."""
    if weight_decay:
        grads = list(torch._foreach_add(grads, w, alpha=weight_decay))
    if velocity:
        torch._foreach_mul_(velocity, momentum)
        torch._foreach_add_(velocity, grads)
        grads = velocity
    torch._foreach_sub_(w, torch._foreach_mul(grads, lr))


def _by_factor(names: Iterable[str], rates: Rates) -> dict[float, list[str]]:
    """Names in groups that have the same rate."""
    return _grouped(names, {name: rate.factor for name, rate in rates.items()}, 1.0)


def _grouped(names: Iterable[str], key: Mapping[str, T], other: T) -> dict[T, list[str]]:
    groups: dict[T, list[str]] = {}
    for name in names:
        groups.setdefault(key.get(name, other), []).append(name)
    return groups


def made_by(make: MakeOptimizer, training: Training, params: list[Any], lr: float) -> torch.optim.Optimizer:
    """A custom optimizer with the recipe's learning rate, and its momentum and weight decay where they are set.

    `params` are tensors, or groups of them with their own rates.

    >>> made_by(torch.optim.RMSprop, Training(weight_decay=0.1), [torch.zeros(2)], lr=0.5).defaults["weight_decay"]
    0.1
    """
    name = name_of(make)
    given = {"lr": lr, **{k: v for k in ("momentum", "weight_decay") if (v := getattr(training, k))}}
    takes = inspect.signature(make).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in takes):
        for missing in [k for k in given if k not in {p.name for p in takes}]:
            hint = "Write a function such as lambda params, lr: torch.optim.RMSprop(params, lr=lr)"
            raise BadInput(
                f'optimizer="{name}" takes no argument "{missing}". '
                + (f"{hint}." if missing == "lr" else f"Leave {missing} out, or write a function that takes it.")
            )
    made: object = make(params, **given)
    if not isinstance(made, torch.optim.Optimizer):
        raise BadInput(f'optimizer="{name}" must make a torch.optim.Optimizer, got {type(made).__name__}.')
    if inspect.signature(made.step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
        raise BadInput(f'optimizer="{name}" needs a closure that computes the loss again, which fednorms cannot give.')
    return made


def name_of(thing: object) -> str:
    """The name of a function or class, of what a partial calls, or of an object's class.

    >>> from functools import partial
    >>> name_of(torch.optim.SGD), name_of(partial(torch.optim.SGD, nesterov=True))
    ('SGD', 'SGD')
    """
    inner = getattr(thing, "func", thing)
    return name_of(inner) if inner is not thing else getattr(thing, "__name__", type(thing).__name__)


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and a.dtype == b.dtype
