"""A flat tree of tensors: the one value that models, gradients, updates and control variates share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.stacked import is_stacked


class Tree(dict[str, Tensor]):
    """Named tensors with the arithmetic that the papers' formulas use.

    `a + b` and `a - b` have the left operand's keys. A key missing on the right leaves the left entry as it is: a
    correction that knows fewer tensors (without a frozen head, for example) does not change the others. `dot` and
    `sqnorm` run over the common keys as one long vector.

    >>> a = Tree(w=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0]))
    >>> (a - 2 * Tree(w=torch.ones(2)))["w"].tolist(), float(a.sqnorm())
    ([-1.0, 0.0], 14.0)
    """

    __slots__ = ()

    def map(self, f: Callable[[Tensor], Tensor]) -> Tree:
        """Apply `f` to every tensor.

        >>> Tree(w=torch.ones(2)).map(torch.exp)["w"].shape
        torch.Size([2])
        """
        return Tree({k: f(v) for k, v in self.items()})

    def _with(self, other: Tree, many: Callable[..., Iterable[Tensor]]) -> Tree:
        common = [k for k in self if k in other]
        out = Tree(self)
        if common:
            out.update(zip(common, many([self[k] for k in common], [other[k] for k in common]), strict=True))
        return out

    def __add__(self, other: Tree) -> Tree:
        return self._with(other, torch._foreach_add)

    def __sub__(self, other: Tree) -> Tree:
        return self._with(other, torch._foreach_sub)

    def __mul__(self, scalar: float | Tensor) -> Tree:
        if not self:
            return Tree()
        return Tree(zip(self, torch._foreach_mul(list(self.values()), scalar), strict=True))

    __rmul__ = __mul__

    def __truediv__(self, scalar: float | Tensor) -> Tree:
        if not self:
            return Tree()
        return Tree(zip(self, torch._foreach_div(list(self.values()), scalar), strict=True))

    def __neg__(self) -> Tree:
        return self * -1.0

    def dot(self, other: Tree) -> Tensor:
        """The inner product over the common keys.

        >>> float(Tree(w=torch.ones(3)).dot(Tree(w=torch.full((3,), 2.0), b=torch.ones(9))))
        6.0
        """
        terms = [(v * other[k]).sum() for k, v in self.items() if k in other]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def sqnorm(self) -> Tensor:
        """The squared Euclidean norm of all tensors together.

        >>> float(Tree(w=torch.tensor([3.0, 4.0])).sqnorm())
        25.0
        """
        if not self or not all(t.is_floating_point() and not is_stacked(t) for t in self.values()):
            return self.dot(self)
        total: Tensor = _SquaredNorm.apply(*self.values())
        return total

    def zeros(self) -> Tree:
        """The same names and shapes, all zero.

        >>> Tree(w=torch.ones(2)).zeros()["w"].tolist()
        [0.0, 0.0]
        """
        return self.map(torch.zeros_like)

    def clone(self) -> Tree:
        """A copy that shares no memory.

        >>> a = Tree(w=torch.ones(1)); b = a.clone(); _ = b["w"].add_(1); a["w"].item()
        1.0
        """
        return self.map(lambda t: t.detach().clone())

    def detach(self) -> Tree:
        """The same tensors as constants.

        >>> Tree(w=torch.ones(1, requires_grad=True)).detach()["w"].requires_grad
        False
        """
        return self.map(torch.Tensor.detach)

    def to(self, like: torch.dtype | torch.device | str) -> Tree:
        """Move floating tensors to a dtype, or all tensors to a device.

        >>> Tree(w=torch.ones(1), n=torch.tensor(3)).to(torch.float64)["n"].dtype
        torch.int64
        """
        if isinstance(like, torch.dtype):
            return self.map(lambda t: t.to(like) if t.is_floating_point() else t)
        return self.map(lambda t: t.to(like))

    def pick(self, names: Iterable[str]) -> Tree:
        """The entries with these names, in this order; names that are not there are left out.

        >>> list(Tree(a=torch.ones(1), b=torch.ones(1)).pick(["b", "c"]))
        ['b']
        """
        return Tree({k: self[k] for k in names if k in self})

    def marks(self) -> list[tuple[str, Tensor, int]]:
        """The entries as they are now, for `is_as`; they are kept alive so that their identity is not reused."""
        return [(k, v, v._version) for k, v in self.items()]

    def is_as(self, marks: list[tuple[str, Tensor, int]]) -> bool:
        """Whether no entry has been replaced or written to since.

        >>> tree = Tree(w=torch.zeros(1))
        >>> before = tree.marks()
        >>> _ = tree["w"].add_(1)
        >>> tree.is_as(before)
        False
        """
        now = self.marks()
        return len(now) == len(marks) and all(
            a == b and v is w and i == j for (a, v, i), (b, w, j) in zip(now, marks, strict=True)
        )

    def finite(self) -> bool:
        """Whether every floating entry is finite.

        >>> Tree(w=torch.tensor([1.0, float("nan")])).finite()
        False
        """
        checks = [torch.isfinite(v).all() for v in self.values() if v.is_floating_point()]
        return not checks or bool(torch.stack(checks).all())  # a GPU synchronizes once

    def nbytes(self) -> int:
        """How many bytes the tensors hold.

        >>> Tree(w=torch.zeros(10)).nbytes()
        40
        """
        return sum(t.numel() * t.element_size() for t in self.values())


class _SquaredNorm(torch.autograd.Function):
    """sum |t|^2, whose gradient 2 t takes one pass over all tensors: many losses pull towards a point."""

    @staticmethod
    @override
    def forward(*tensors: Tensor) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors)).square().sum()

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @override
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, ...]:
        slope = 2 * gradient[0]
        if torch.is_grad_enabled():  # to be differentiated again, which torch cannot do below
            return tuple(slope * t for t in ctx.saved_tensors)
        return tuple(torch._foreach_mul(ctx.saved_tensors, slope))


def join(**trees: Tree) -> Tree:
    """Several trees as one, each under its own prefix: what a part with two states uploads or keeps.

    >>> sorted(join(h=Tree(w=torch.ones(1)), c=Tree(w=torch.zeros(1))))
    ['c/w', 'h/w']
    """
    return Tree({f"{prefix}/{k}": v for prefix, tree in trees.items() for k, v in tree.items()})


def branch(tree: Tree, prefix: str) -> Tree:
    """The tree that `join` stored under a prefix.

    >>> branch(join(h=Tree(w=torch.ones(1)), c=Tree(w=torch.zeros(1))), "h")["w"].item()
    1.0
    """
    start = prefix + "/"
    return Tree({k[len(start) :]: v for k, v in tree.items() if k.startswith(start)})


def mean(trees: list[Tree], weights: list[float]) -> Tree:
    """The weighted mean of trees with equal keys, summed in float64 in the given order.

    Weights are divided by their sum. A single tree is returned bit for bit; integer entries (counters) are the first
    tree's, never averaged.

    >>> mean([Tree(w=torch.tensor([1.0])), Tree(w=torch.tensor([4.0]))], [2, 1])["w"].item()
    2.0
    """
    total = float(sum(weights))
    if all(isinstance(tree, Packed) for tree in trees):
        return _packed_mean([tree for tree in trees if isinstance(tree, Packed)], [w / total for w in weights])
    out = Tree()
    for name, first in trees[0].items():
        if len(trees) == 1 or not first.is_floating_point():
            out[name] = first
            continue
        acc = first.to(torch.float64, copy=True).mul_(weights[0] / total)
        for tree, weight in zip(trees[1:], weights[1:], strict=True):
            acc.add_(tree[name].to(acc), alpha=weight / total)  # where the first tree is
        out[name] = acc.to(first.dtype)
    return out


class Packed(Tree):
    """A tree whose floating tensors are views of one block of memory, so averaging is one operation per client.

    >>> block = torch.tensor([1.0, 2.0, 3.0])
    >>> tree = Packed({"w": block[:2], "b": block[2:]}, block)
    >>> mean([tree, Packed({"w": block[:2], "b": block[2:]}, 3 * block)], [1, 1])["b"].item()
    6.0
    """

    __slots__ = ("block",)

    def __init__(self, tensors: dict[str, Tensor], block: Tensor) -> None:
        super().__init__(tensors)
        self.block = block

    def over(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors with floats at the same places of another block."""
        shift = block.storage_offset() - self.block.storage_offset()  # a block may be a row of several clients'

        def same_place(t: Tensor) -> Tensor:
            return block.as_strided(t.size(), t.stride(), t.storage_offset() + shift)

        return {k: same_place(t) if t.is_floating_point() else t for k, t in self.items()}

    def moved(self, move: Callable[[Tensor], Tensor]) -> Packed:
        """The same tree with its block, and its integers, copied elsewhere."""
        block = move(self.block)
        return Packed({k: t if t.is_floating_point() else move(t) for k, t in self.over(block).items()}, block)


def _packed_mean(trees: list[Packed], shares: list[float]) -> Tree:
    first = trees[0]
    if len(trees) == 1:
        return Tree(first)
    total = first.block.to(torch.float64, copy=True).mul_(shares[0])
    for tree, share in zip(trees[1:], shares[1:], strict=True):
        total.add_(tree.block.to(total.device), alpha=share)
    return Tree(first.over(total.to(first.block.dtype)))
