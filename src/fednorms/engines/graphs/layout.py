"""A model as one block of floats: loading a client and averaging it are then single operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fednorms.core.tree import Tree

ALIGNED = 64  # elements: tensors in a block are aligned like separate allocations


class Layout:
    """The place of each tensor of a model in one block of floats, exchanged ones first; integers are kept apart."""

    def __init__(self, model: Tree, exchanged: Sequence[str]) -> None:
        floats = [n for n in model if model[n].is_floating_point()]
        first = [n for n in exchanged if n in set(floats)]
        self.names = first + [n for n in floats if n not in set(first)]
        self.integers = [n for n in model if n not in set(floats)]
        self.shapes = {n: model[n].shape for n in self.names}
        self.places: dict[str, int] = {}
        end = 0
        for name in self.names:
            self.places[name] = end
            end += -(-model[name].numel() // ALIGNED) * ALIGNED
            if name in first:
                self.exchanged = end
        self.size = end
        if not first:
            self.exchanged = 0

    def views(self, block: Tensor) -> Tree:
        """The tensors of a model as views of a block.

        `.data` gives each its own version counter: when a step updates a running mean in place, autograd must not
        believe that a weight in the same block has changed.
        """
        return Tree(
            {n: block[p : p + self.shapes[n].numel()].view(self.shapes[n]).data for n, p in self.places.items()}
        )

    def stacked(self, block: Tensor, count: int) -> Tree:
        """The tensors of `count` models as views of a block of `count` sizes: the rows of a tensor are neighbors."""
        return Tree(
            {
                n: block[count * p : count * (p + self.shapes[n].numel())].view(count, *self.shapes[n]).data
                for n, p in self.places.items()
            }
        )

    def rows(self, blocks: Tensor) -> Tree:
        """The tensors of several models, one row of `blocks` each: their first axis is the rows'."""
        return Tree(
            {
                n: blocks[:, p : p + self.shapes[n].numel()].unflatten(1, self.shapes[n])
                if self.shapes[n]
                else blocks[:, p]
                for n, p in self.places.items()
            }
        )

    def block(self, like: Tensor, count: int = 1) -> Tensor:
        """A new block of zeros."""
        return torch.zeros(count * self.size, dtype=like.dtype, device=like.device)


def shapes_of(*groups: Mapping[str, Tree]) -> list[dict[str, torch.Size]]:
    """Shapes of all tensors in groups of trees, in the order of the trees' names."""
    return [{k: t.shape for k, t in group[name].items()} for group in groups for name in sorted(group)]


def copy_tree(to: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy the tensors that both trees have, in as few operations as possible."""
    names = [n for n in to if n in source]
    if names:
        torch._foreach_copy_([to[n] for n in names], [source[n] for n in names])
