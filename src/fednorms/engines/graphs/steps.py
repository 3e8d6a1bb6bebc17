"""The steps of a phase, recorded once per code path and batch shape, for one client or for several that take them
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fednorms.core.batches import batch_plan
from fednorms.core.error_origin import culprit
from fednorms.core.noise import seed_of
from fednorms.core.optim import Optimizer
from fednorms.core.part import Phase
from fednorms.core.round import rate_of
from fednorms.core.states import Batch, Carry, Client, Task
from fednorms.core.tree import Tree
from fednorms.engines.graphs.capture import WARM_UPS, Device, Job
from fednorms.engines.graphs.data import DeviceData
from fednorms.engines.graphs.layout import Layout
from fednorms.engines.graphs.workspace import Captured, Way, zero


class Space(Protocol):
    """Fixed memory for one client, or for several that take their steps together."""

    task: Task
    carry: Carry
    optimizer: Optimizer
    stream: Any
    pool: Any
    graphs: dict[tuple[object, ...], Captured]

    @property
    def count(self) -> int:
        """The number of clients."""
        ...

    @property
    def data(self) -> tuple[Tensor, Tensor] | None:
        """The data of the client, if those of all clients do not fit on the device."""
        ...

    def moments(self, kept: Sequence[Tree]) -> None:
        """Continue with the momentum of earlier rounds, where clients have kept it."""
        ...

    def step(self, batches: list[Batch], phase: Phase, way: Way) -> None:
        """Take one step, on the clients' batches one after the other."""
        ...

    def written(self) -> list[Tensor]:
        """All tensors that a step changes."""
        ...


@dataclass
class Steps:
    """What all spaces of an engine share: the task, the data, the device; and the way to take steps in a space."""

    task: Task
    layout: Layout
    data: DeviceData
    device: Device
    notes: list[str]
    streams: list[Any] = field(default_factory=list)
    captures: int = 0

    def note(self, text: str) -> None:
        """Tell the user something, once."""
        if text not in self.notes:
            self.notes.append(text)

    def phase(
        self, space: Space, outer: Carry, phase: Phase, number: int, clients: Sequence[Client], kept: Sequence[Tree]
    ) -> list[int]:
        """Take the steps of a phase and return how many images each client drops; `kept` is its momentum."""
        task, optimizer = space.task, space.optimizer
        outer.active = task.net.trainable(phase.train, also_frozen=outer.context.evaluating)
        optimizer.lr.fill_(rate_of(outer.context, phase))
        optimizer.updates.zero_()
        if not (task.training.keep_momentum and number):
            zero(optimizer.first_moment)
        zero(optimizer.second_moment)
        if task.training.keep_momentum and not number:
            space.moments(kept)
        plans, dropped = [], []
        for client in clients:
            seed = seed_of("data", task.seed, outer.context.round, client.name, number)
            plan, lost = batch_plan(len(client.data), task.training, phase, seed, needs_two=task.needs_two)
            first = self.data.first.get(client.name, 0)
            plans.append([rows + first for rows in plan])
            dropped.append(lost)
        plans += [plans[-1]] * (space.count - len(plans))
        draws = range(phase.draws)
        groups = [[i + draw for draw in draws] for i in range(0, len(plans[0]) - phase.draws + 1, phase.draws)]
        shapes = [tuple(plans[0][i].numel() for i in group) for group in groups]
        ready: dict[tuple[int, ...], Captured] = {}
        for shape in dict.fromkeys(shapes):
            members = [g for g, s in zip(groups, shapes, strict=True) if s == shape]
            captured = ready[shape] = self._captured(space, outer, phase, shape, len(members))
            for draw, target in enumerate(captured.plans):
                rows = torch.stack([torch.cat([plan[g[draw]] for plan in plans]) for g in members])
                target[: len(members)].copy_(self.device.pinned(rows), non_blocking=True)
            captured.at.zero_()
            self._count(outer, captured.names, len(members))
        for shape in shapes:
            ready[shape].run()
        return dropped

    def _count(self, outer: Carry, names: list[str], steps: int) -> None:
        outer.steps += steps
        outer.exchanged_steps += steps * (not set(outer.active).isdisjoint(self.task.net.sent_params))
        for name in names:
            outer.grad_steps[name] = outer.grad_steps.get(name, 0) + steps

    def _captured(self, space: Space, outer: Carry, phase: Phase, shape: tuple[int, ...], steps: int) -> Captured:
        key = (phase.train, phase.norm, shape, tuple(sorted(outer.path.items())))
        known = space.graphs.get(key)
        if known and len(known.plans[0]) >= steps:
            return known
        if known:
            self.device.forget(known.run)
        like = self.task.like
        # No client needs a longer plan than the largest.
        room = max(steps, phase.steps or (phase.epochs or 1) * (self.data.longest // max(*shape, 1) + 1))
        plans = [torch.zeros(room, space.count * n, dtype=torch.long, device=like.device) for n in shape]
        at = torch.zeros(1, dtype=torch.long, device=like.device)
        way = Way(outer.active, outer.path, outer.context)

        def one_step() -> None:
            x, y = space.data or self.data.resident or (at, at)
            rows = [plan.index_select(0, at).view(-1) for plan in plans]
            space.step([(x.index_select(0, r), y.index_select(0, r)) for r in rows], phase, way)
            at.add_(1)

        saved = [(t, t.detach().clone()) for t in space.written()]
        space.carry.grad_steps, space.carry.fresh = {}, True
        for _ in range(WARM_UPS):
            one_step()
            at.zero_()
        self.device.synchronize()
        moved = list(space.carry.grad_steps)  # read before recording, which may fail halfway through the step
        record = self.graph_of if space.count == 1 else self.device.record
        run = record(one_step, space.stream, space.pool)
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
        space.graphs[key] = Captured(run, plans, at, moved)
        self.captures += 1
        return space.graphs[key]

    def graph_of(self, job: Job, stream: object, pool: object) -> Job:
        """A job as a graph; if it cannot be captured, the job itself, with a note that says which part and why."""
        try:
            return self.device.record(job, stream, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.device.synchronize()
            found = culprit(error)
            who = f"{found[0]} ({found[1]})" if found else "the model"
            self.note(f"{who} cannot be captured in a CUDA graph and runs eagerly: {first_line(error)}")
            return job


def first_line(error: BaseException) -> str:
    r"""What an error says first.

    >>> first_line(RuntimeError("No kernel for this.\nCompile with more."))
    'No kernel for this.'
    """
    first = error.__context__ or error  # ending a failed capture raises again
    return str(first).strip().splitlines()[0]
