"""Fixed memory for the carry of one client, and the graphs that were captured with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fednorms.core.optim import Optimizer
from fednorms.core.part import Phase
from fednorms.core.round import carry_of, noise_word, step
from fednorms.core.states import Batch, Broadcast, Carry, Client, Task, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Context
from fednorms.engines.graphs.capture import Device
from fednorms.engines.graphs.layout import Layout, copy_tree, shapes_of


class Way(NamedTuple):
    """What the clients of a recorded step have in common: the names in training, the code path, the round."""

    active: list[str]
    path: dict[str, Hashable]
    context: Context


@dataclass
class Captured:
    """A step as a graph (or as a function, if it cannot be captured), and the plan of row numbers that it reads."""

    run: Callable[[], None]
    plans: list[Tensor]  # per draw: (most steps, batch) row numbers
    at: Tensor  # the next row of the plans
    names: list[str]  # tensors that got a gradient


@dataclass
class Workspace:
    """Memory for one client at a time, a stream, and the graphs captured with them."""

    count: ClassVar[int] = 1
    task: Task  # as the captured steps see it
    layout: Layout
    carry: Carry
    optimizer: Optimizer  # the carry's
    live: Tensor  # block of the model in training
    origin: Tensor  # block of the model at the start; slots may share it
    integers: Tree
    relative: Tensor  # u_k of the present client
    lr: Tensor  # learning rate of the round; a phase may have another
    stream: Any
    pool: Any
    data: tuple[Tensor, Tensor] | None  # data of the present client, if those of all clients do not fit on the device
    sent: Broadcast | None = None  # the broadcast whose parts are in this memory
    graphs: dict[tuple[object, ...], Captured] = field(default_factory=dict)
    twin: Workspace | None = None  # for the client's second model, if the method has one

    @classmethod
    def new(
        cls,
        task: Task,
        layout: Layout,
        client: Client,
        sent: Broadcast,
        mine: dict[str, Tree],
        model: Tree,
        origin: Tensor | None,
        stream: object,
        pool: object,
        data: tuple[Tensor, Tensor] | None,
    ) -> Self:
        """Memory of the shapes that this client needs; it keeps the trees of `sent` and `mine`.

        `origin` is the block of the model at the start if others hold it, too.
        """
        like = task.like
        live, origin = layout.block(like), layout.block(like) if origin is None else origin
        integers = Tree({n: model[n].clone() for n in layout.integers})
        whole = Tree({**layout.views(live), **integers})
        start = Tree({**layout.views(origin), **integers})
        carry = carry_of(task, sent, client, context_of(task, sent.round, client), mine, start)
        carry.params, carry.buffers = whole.pick(carry.params), whole.pick(task.net.buffers)
        carry.fixed = whole.pick(carry.fixed)
        carry.optimizer = optimizer = Optimizer.fresh(
            task.training, carry.params.detach(), 0.0, like, rates=task.net.rates
        )
        relative, lr = torch.ones_like(like), torch.zeros_like(like)
        return cls(task, layout, carry, optimizer, live, origin, integers, relative, lr, stream, pool, data)

    def fits(self, sent: Broadcast, mine: dict[str, Tree]) -> bool:
        """Whether what parts send and keep has the shapes of this memory."""
        return shapes_of(self.carry.broadcast.parts, self.carry.mine) == shapes_of(sent.parts, mine)

    def fill(self, sent: Broadcast, common: Tree, packed: Tensor, mine: dict[str, Tree], model: Tree) -> None:
        """Copy a client into this memory: the block of the common model, what differs from it, the parts' states."""
        if self.origin is not packed:
            self.origin.copy_(packed)
            own = {n: t for n, t in model.items() if t is not common[n]}
            targets = self.layout.views(self.origin) if own else Tree()
            copy_tree({n: targets[n] for n in own if n in targets}, own)
        copy_tree(self.integers, model)
        self.live.copy_(self.origin)
        for name, tree in mine.items():
            copy_tree(self.carry.mine[name], tree)
        if self.sent is not sent:
            for name, tree in sent.parts.items():
                copy_tree(self.carry.broadcast.parts[name], tree)
            self.sent = sent

    def reset(self, context: Context) -> None:
        """Set what a step reads about the client and the round, and reset its counters."""
        self.carry.key[:1].fill_(noise_word(self.task, context))
        self.carry.key[1:].zero_()
        self.relative.fill_(context.relative)
        self.lr.fill_(context.lr)
        self.carry.loss_sum.zero_()
        zero(self.carry.grad_sum)

    def moments(self, kept: Sequence[Tree]) -> None:
        """Continue with the momentum of earlier rounds, where the client has kept it."""
        copy_tree(self.optimizer.first_moment, kept[0])

    def step(self, batches: list[Batch], phase: Phase, way: Way) -> None:
        """Take one step."""
        active, carry = set(way.active), self.carry
        for name, tensor in carry.params.items():
            tensor.requires_grad_(name in active)
        carry.active, carry.path = way.active, way.path
        # What differs between clients and rounds is a tensor inside the graph.
        carry.context = replace(way.context, lr=self.lr, relative=self.relative)  # type: ignore[arg-type]
        step(self.task, carry, batches, phase)

    def model(self) -> tuple[Tree, Tensor]:
        """A copy of the model in training, and the block that holds its floats."""
        block = self.live.clone()
        return Tree({**self.layout.views(block), **self.integers.clone()}), block

    def close(self, device: Device) -> None:
        """Free all graphs."""
        for captured in self.graphs.values():
            device.forget(captured.run)
        self.graphs.clear()
        if self.twin:
            self.twin.close(device)

    def memory(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        return tensors_of(self.carry, self.optimizer, self.relative, self.lr, *(self.data or ()))

    def written(self) -> list[list[Tensor]]:
        """All tensors that a step changes, in groups that move at one scale."""
        states = [self.carry.mine[p.name] for p in self.task.method.writing]
        return written_by(self.carry, self.optimizer, self.layout.views(self.live), self.integers, *states)


def tensors_of(carry: Carry, optimizer: Optimizer, *others: Tensor) -> list[Tensor]:
    """All tensors that a step reads or writes, each once."""
    trees = [carry.params, carry.fixed, carry.buffers, carry.start, carry.start_buffers, carry.grad_sum]
    trees += [optimizer.first_moment, optimizer.second_moment, *carry.mine.values(), *carry.broadcast.parts.values()]
    single = (carry.key, carry.loss_sum, optimizer.lr, optimizer.updates, *others)
    return list({id(t): t for t in (*single, *(t for tree in trees for t in tree.values()))}.values())


def written_by(carry: Carry, optimizer: Optimizer, *others: Tree) -> list[list[Tensor]]:
    """All tensors that a step changes, in groups that move at one scale; `others` are the models and states."""
    trees = (carry.grad_sum, optimizer.first_moment, optimizer.second_moment, *others)
    return [[carry.key], [carry.loss_sum], [optimizer.updates], *(list(tree.values()) for tree in trees)]


def zero(tree: Tree) -> None:
    """Set all tensors to zero, in one operation."""
    if tree:
        torch._foreach_zero_(list(tree.values()))
