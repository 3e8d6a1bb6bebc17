"""Clients that take a step together: tensors with a hidden leading axis, one row per client (`torch.func.vmap`).

Inside such a step every tensor looks like that of one client. Autograd does not follow these tensors, but it follows
the tensors below them, whose first axis is the clients'. Losses of different clients share no parameters, so the
gradient of their sum is the gradient of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as beneath


def is_stacked(t: Tensor) -> bool:
    """Whether a tensor holds several clients' values.

    >>> is_stacked(torch.zeros(2)), torch.func.vmap(lambda t: t * is_stacked(t))(torch.ones(2)).tolist()
    (False, [1.0, 1.0])
    """
    return functorch.is_batchedtensor(t)


def below(t: Tensor) -> Tensor:
    """The tensor below a stacked one, with the clients' axis first; any other tensor as it is."""
    if not functorch.is_batchedtensor(t):
        return t
    axis, found = functorch.maybe_get_bdim(t), functorch.get_unwrapped(t)
    return found if axis == 0 else found.movedim(axis, 0)


def above(t: Tensor, level: int) -> Tensor:
    """A tensor whose first axis is the clients', as a stacked one."""
    stacked: Tensor = functorch._add_batch_dim(t, 0, level)
    return stacked


def level_of(t: Tensor) -> int:
    """The level of `torch.func.vmap` that a stacked tensor belongs to."""
    found: int = functorch.maybe_get_level(t)
    return found


def follows(t: Tensor) -> bool:
    """Whether autograd follows a tensor: `requires_grad`, also inside a stack."""
    return bool(below(t).requires_grad)


def leaf(t: Tensor, *, moves: bool) -> Tensor:
    """A tensor with the same values at which a derivative can be taken, if it moves."""
    if not functorch.is_batchedtensor(t):
        return t.detach().requires_grad_(moves)
    with beneath():
        new = below(t).detach().requires_grad_(moves)
    return above(new, level_of(t))


def gradient(y: Tensor, leaves: Sequence[Tensor], **how: bool) -> Sequence[Tensor | None]:
    """`torch.autograd.grad`, also inside a stack."""
    if not functorch.is_batchedtensor(y):
        return torch.autograd.grad(y, leaves, **how)  # type: ignore[call-overload,no-any-return]
    if not all(functorch.is_batchedtensor(t) for t in leaves):  # their slope would be the sum over clients
        raise NotImplementedError("a tensor that clients share has no gradient of its own for each of them")
    level, total = level_of(y), below(y)
    with beneath():
        found = torch.autograd.grad(total.sum(), [below(t) for t in leaves], **how)  # type: ignore[call-overload]
    return [None if g is None else above(g, level) for g in found]
