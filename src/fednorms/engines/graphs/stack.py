"""Fixed memory for clients that take their steps together: every tensor has one row per client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from fednorms.core.optim import Optimizer
from fednorms.core.part import Phase
from fednorms.core.round import carry_of, noise_word, step
from fednorms.core.stacked import above, level_of
from fednorms.core.states import Batch, Broadcast, Carry, Client, Task
from fednorms.core.tree import Tree
from fednorms.core.views import Context
from fednorms.engines.graphs.capture import Device
from fednorms.engines.graphs.layout import Layout, copy_tree, shapes_of
from fednorms.engines.graphs.stacked_ops import StackedOperations
from fednorms.engines.graphs.workspace import Captured, Way, tensors_of, written_by, zero


@dataclass
class Arrived:
    """A client at the start of its round, before it is copied into the memory of a stack."""

    client: Client
    context: Context
    sent: Broadcast
    mine: dict[str, Tree]
    model: Tree
    early: dict[str, Tree]


@dataclass
class Stack:
    """Memory for `count` clients, a stream, and the graphs captured with them. `carry` holds tensors with all rows."""

    task: Task
    layout: Layout
    count: int
    carry: Carry
    optimizer: Optimizer
    live: Tree  # all models in training; integers are apart
    origin: Tree  # all models at the start
    integers: Tree
    relative: Tensor  # u_k of each client
    lr: Tensor
    addressed: bool  # what parts send differs by client
    stream: Any
    pool: Any
    data: ClassVar[None] = None  # a stack reads the data of all clients
    sent: Broadcast | None = None
    graphs: dict[tuple[object, ...], Captured] = field(default_factory=dict)

    @classmethod
    def new(
        cls, task: Task, layout: Layout, count: int, first: Arrived, stream: object, pool: object, *, addressed: bool
    ) -> Self:
        """Memory of the shapes that this client needs, `count` times."""
        like = task.like

        def rows(tree: Tree) -> Tree:
            return tree.map(lambda t: t.detach().unsqueeze(0).repeat(count, *[1] * t.dim()))

        one = carry_of(task, first.sent, first.client, first.context, first.mine, first.model)
        live = layout.stacked(layout.block(like, count), count)
        origin = layout.stacked(layout.block(like, count), count)
        integers = rows(first.model.pick(layout.integers))
        whole, start = Tree({**live, **integers}), Tree({**origin, **integers})
        parts = {k: rows(v) if addressed else v.clone() for k, v in first.sent.parts.items()}
        carry = replace(
            one,
            broadcast=replace(first.sent, parts=parts),
            params=whole.pick(one.params).detach(),
            fixed=whole.pick(one.fixed),
            buffers=whole.pick(one.buffers),
            start=start.pick(one.start),
            start_buffers=start.pick(one.start_buffers),
            mine={k: rows(v) for k, v in first.mine.items()},
            key=one.key.repeat(count, 1),
            loss_sum=one.loss_sum.repeat(count),
            grad_sum=rows(one.grad_sum),
            velocity=Tree(),
        )
        carry.optimizer = Optimizer.fresh(task.training, carry.params.detach(), 0.0, like, rates=task.net.rates)
        relative, lr = torch.ones_like(like).repeat(count), torch.zeros_like(like)
        memory = (live, origin, integers, relative, lr, addressed, stream, pool)
        return cls(task, layout, count, carry, carry.optimizer, *memory)

    def fits(self, sent: Broadcast, mine: dict[str, Tree]) -> bool:
        """Whether what parts send and keep has the shapes of this memory."""
        here = [{k: t.shape[1:] for k, t in self.carry.mine[n].items()} for n in sorted(self.carry.mine)]
        parts = self.carry.broadcast.parts
        sends = [{k: t.shape[self.addressed :] for k, t in parts[n].items()} for n in sorted(parts)]
        return sends + here == shapes_of(sent.parts, mine)

    # -- a round ------------------------------------------------------------------------------------------------
    def fill(self, sent: Broadcast, common: Tree, clients: Sequence[Arrived]) -> None:
        """Copy clients into this memory; rows beyond the last client repeat it."""
        rows = [*clients, *[clients[-1]] * (self.count - len(clients))]
        shared: list[str] = []
        own: list[str] = []
        for name in (*self.layout.names, *self.layout.integers):
            alike = all(a.model[name] is common[name] for a in clients)
            (shared if alike else own).append(name)
        target = Tree({**self.origin, **self.integers})
        if shared:
            wide = [common[n].expand(self.count, *common[n].shape) for n in shared]
            torch._foreach_copy_([target[n] for n in shared], wide)
        _gather(target, own, [a.model for a in rows])
        copy_tree(self.live, self.origin)
        for part, tree in self.carry.mine.items():
            _gather(tree, tree, [a.mine[part] for a in rows])
        for part, tree in self.carry.broadcast.parts.items():
            if self.addressed:
                _gather(tree, tree, [a.sent.parts[part] for a in rows])
            elif self.sent is not sent:
                copy_tree(tree, sent.parts[part])
        self.sent = sent
        words = [[noise_word(self.task, a.context), 0] for a in rows]
        self.carry.key.copy_(torch.tensor(words))
        self.relative.copy_(torch.tensor([a.context.relative for a in rows], dtype=self.relative.dtype))
        self.lr.fill_(clients[0].context.lr)
        self.carry.loss_sum.zero_()
        zero(self.carry.grad_sum)

    def moments(self, kept: Sequence[Tree]) -> None:
        """Continue with the momentum of earlier rounds, where clients have kept it."""
        rows = [*kept, *[kept[-1]] * (self.count - len(kept))]
        for name, moment in self.optimizer.first_moment.items():
            found = [row.get(name) for row in rows]
            if any(t is not None for t in found):
                blank = torch.zeros_like(moment[0])
                torch.stack([blank if t is None else t for t in found], out=moment)

    def models(self) -> tuple[list[Tree], Tensor]:
        """Copies of all models in training, and the block that holds their floats, one row per client."""
        blocks = torch.zeros(self.count, self.layout.size, dtype=self.lr.dtype, device=self.lr.device)
        rows = self.layout.rows(blocks)
        copy_tree(rows, self.live)
        return apart(Tree({**rows, **self.integers.clone()}), self.count), blocks

    # -- a step -------------------------------------------------------------------------------------------------
    def step(self, batches: list[Batch], phase: Phase, way: Way) -> None:
        """Take one step of all clients, whose batches follow one another."""
        active = set(way.active)
        for name, tensor in self.carry.params.items():
            tensor.requires_grad_(name in active)

        def one(key: Tensor) -> Tensor:
            level = level_of(key)

            def lift(tree: Tree) -> Tree:
                return tree.map(lambda t: above(t, level))

            mine, parts = {k: lift(v) for k, v in self.carry.mine.items()}, self.carry.broadcast.parts
            optimizer = replace(
                self.optimizer,
                first_moment=lift(self.optimizer.first_moment),
                second_moment=lift(self.optimizer.second_moment),
            )
            inner = replace(
                self.carry,
                context=replace(way.context, lr=self.lr, relative=above(self.relative, level)),  # type: ignore[arg-type]
                broadcast=replace(self.carry.broadcast, parts={k: lift(v) for k, v in parts.items()})
                if self.addressed
                else self.carry.broadcast,
                params=lift(self.carry.params),
                fixed=lift(self.carry.fixed),
                buffers=lift(self.carry.buffers),
                start=lift(self.carry.start),
                start_buffers=lift(self.carry.start_buffers),
                mine=mine,
                key=key,
                loss_sum=above(self.carry.loss_sum, level),
                grad_sum=lift(self.carry.grad_sum),
                active=way.active,
                path=way.path,
                optimizer=optimizer,
            )
            lifted = [tuple(above(t.unflatten(0, (self.count, -1)), level) for t in pair) for pair in batches]
            with StackedOperations():
                step(self.task, inner, lifted, phase)  # type: ignore[arg-type]
            self.carry.fresh = False
            return key

        with _no_slow_rules():
            torch.func.vmap(one)(self.carry.key)

    def memory(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        return tensors_of(self.carry, self.optimizer, self.relative, self.lr)

    def written(self) -> list[list[Tensor]]:
        """All tensors that a step changes, in groups that move at one scale."""
        return written_by(self.carry, self.optimizer, self.live, self.integers)

    def close(self, device: Device) -> None:
        """Free all graphs."""
        for captured in self.graphs.values():
            device.forget(captured.run)
        self.graphs.clear()


def apart(tree: Tree, count: int) -> list[Tree]:
    """One tree per row."""
    columns = {n: t.detach().unbind(0) for n, t in tree.items()}
    return [Tree({n: column[k] for n, column in columns.items()}) for k in range(count)]


def _gather(to: Tree, names: Sequence[str] | Mapping[str, Tensor], rows: Sequence[Mapping[str, Tensor]]) -> None:
    for name in names:
        torch.stack([row[name].detach() for row in rows], out=to[name].detach())


@contextmanager
def _no_slow_rules() -> Iterator[None]:
    """Refuse operations that vmap would run client by client."""
    before = functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]
    functorch._set_vmap_fallback_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)  # type: ignore[attr-defined]
