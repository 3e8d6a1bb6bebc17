"""Clients in slots: each takes its steps on its own, and several run side by side on streams."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fednorms.core.round import arrive, base_phases, finish, moved, recipe_phase, start_of_twin
from fednorms.core.states import Broadcast, Carry, Client, ClientState, Task, Upload, context_of
from fednorms.core.tree import Packed, Tree, branch, join
from fednorms.engines.graphs.layout import copy_tree
from fednorms.engines.graphs.steps import Steps
from fednorms.engines.graphs.workspace import Workspace

Results = list[tuple[Upload, ClientState]]


class Slots:
    """A workspace per stream, each for one client at a time."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.spaces: dict[int, Workspace] = {}
        self.common: Tensor | None = None  # block of the model that the server sends
        task = steps.task
        self.alike = not (task.net.own or task.method.addressing or task.method.having("begin"))  # all start from it

    def receive(self, sent: Broadcast) -> Tensor:
        """Copy the model of a round to where slots read it."""
        layout = self.steps.layout
        if self.common is None:
            self.common = layout.block(self.steps.task.like)
        copy_tree(layout.views(self.common), sent.model)
        return self.common

    def run(self, number: int, sent: Broadcast, packed: Tensor, client: Client) -> tuple[Results, Tensor]:
        """A client's round in a slot, and whether its results are finite; `packed` is the block of the common model."""
        task, common, sent = self.steps.task, sent.model, sent.to(client.name)
        context = context_of(task, sent.round, client)
        mine, model, early = arrive(task, sent, client, context)
        path = task.method.path(context)
        seen = {**mine, task.twin.name: Tree()} if task.twin else mine  # the second model has its own workspace
        space = self._workspace(number, sent, client, seen, model)
        space.fill(sent, common, packed, seen, model)
        self.steps.data.fill(space, client)
        space.reset(context)
        outer = replace(
            space.carry, client=client, context=context, broadcast=sent, mine=mine, path=path, grad_steps={}
        )
        outer.optimizer, outer.steps, outer.exchanged_steps, outer.dropped = None, 0, 0, 0  # until the first phase
        outer.velocity = client.state.velocity if client.state else Tree()
        for count, phase in enumerate(base_phases(task, context)):
            outer.dropped += self.steps.phase(space, outer, phase, count, [client], [outer.velocity])[0]
        results = [self._leave(space, outer, early, model)]
        return results, finite(task, results)

    def keep(self, count: int) -> None:
        """Free all slots but the first `count`."""
        for number in [n for n in self.spaces if n >= count]:
            self.spaces.pop(number).close(self.steps.device)
        if not self.spaces:
            self.common = None

    def _leave(self, space: Workspace, outer: Carry, early: dict[str, Tree], model: Tree) -> tuple[Upload, ClientState]:
        """Copy the client out of the workspace and let the parts finish."""
        task, inner = self.steps.task, space.carry
        after, block = space.model()
        outer.mine = {**outer.mine, **{p.name: inner.mine[p.name].clone() for p in task.method.writing}}
        outer.loss_sum, outer.grad_sum = inner.loss_sum.clone(), inner.grad_sum.clone()
        if task.training.keep_momentum and outer.optimizer:
            outer.optimizer = replace(space.optimizer, first_moment=space.optimizer.first_moment.clone())
        hold(task, outer, after, model)
        twin = self._train_twin(space, outer) if task.twin else None
        return leave(task, outer, early, twin, block[: self.steps.layout.exchanged])

    def _train_twin(self, space: Workspace, outer: Carry) -> Tree:
        """Train the client's second model in its own workspace, as `train_twin` of the core does."""
        ours = self.steps.task
        task, twin = ours.for_twin, space.twin or self._twin_workspace(space, outer)
        start, kept = start_of_twin(ours, outer.mine), outer.mine[ours.twin.name if ours.twin else ""]
        twin.live.copy_(space.origin)
        copy_tree({n: t for n, t in self.steps.layout.views(twin.live).items() if n in start}, start)
        copy_tree(twin.integers, {**outer.start_buffers, **start})
        twin.reset(outer.context)
        v = replace(twin.carry, client=outer.client, context=outer.context, path=outer.path, grad_steps={})
        self.steps.phase(twin, v, recipe_phase(task, outer.context), 0, [v.client], [branch(kept, "v")])
        after, _ = twin.model()
        moments = twin.optimizer.first_moment.clone() if task.training.keep_momentum else Tree()
        return join(model=after.pick(start), v=moments)

    def _twin_workspace(self, space: Workspace, outer: Carry) -> Workspace:
        same, model = space.carry, Tree({**outer.start, **outer.fixed, **outer.start_buffers})
        new, pool = (outer.client, same.broadcast, same.mine, model), self.steps.device.pool()
        task = self.steps.data.task.for_twin
        space.twin = Workspace.new(task, self.steps.layout, *new, space.origin, space.stream, pool, space.data)
        return space.twin

    def _workspace(self, number: int, sent: Broadcast, client: Client, mine: dict[str, Tree], model: Tree) -> Workspace:
        steps, known = self.steps, self.spaces.get(number)
        if known and known.fits(sent, mine):
            return known
        if known:  # what parts send or keep has changed its shape
            known.close(steps.device)
        own = {k: v.clone() for k, v in mine.items()}
        copied = replace(sent, parts={k: v.clone() for k, v in sent.parts.items()})
        new = client, copied, own, model, self.common if self.alike else None
        memory = steps.streams[number], steps.device.pool(), steps.data.room()
        self.spaces[number] = Workspace.new(steps.data.task, steps.layout, *new, *memory)
        return self.spaces[number]


def finite(task: Task, results: Results) -> Tensor:
    """Whether the results of each client are finite, as a tensor: the host does not wait."""
    return torch.stack([_all_finite(moved(task, *result), task.like) for result in results])


def _all_finite(trees: list[Tree], like: Tensor) -> Tensor:
    blocks = [tree.block for tree in trees if isinstance(tree, Packed)]
    loose = [t for tree in trees if not isinstance(tree, Packed) for t in tree.values() if t.is_floating_point()]
    checks = [torch.isfinite(t).all() for t in (*blocks, *loose) if t.numel()]
    return torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=like.device)


def hold(task: Task, outer: Carry, after: Tree, model: Tree) -> None:
    """Give a client's carry its trained model, and the one that it started from."""
    net, params, fixed = task.net, list(outer.params), list(outer.fixed)
    outer.params, outer.fixed, outer.buffers = after.pick(params), after.pick(fixed), after.pick(net.buffers)
    outer.start, outer.start_buffers = model.pick(params), model.pick(net.buffers)


def leave(
    task: Task, outer: Carry, early: dict[str, Tree], twin: Tree | None, exchanged: Tensor
) -> tuple[Upload, ClientState]:
    """Let the parts finish; `exchanged` is the block of what is sent."""
    upload, state = finish(task, outer, early, twin)
    state = replace(state, local=state.local.clone())  # a view would keep the whole block in memory
    if not task.method.changing:
        upload = replace(upload, model=Packed(upload.model, exchanged))
    return upload, state
