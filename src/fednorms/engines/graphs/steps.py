"""The steps of a phase, recorded once per code path and batch shape, for one client or for several that take them
together.
"""

from __future__ import annotations

import math
import time
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
from fednorms.engines.graphs.fused import Groups, Program, agree, compiled, rounded, seconds_to_compile
from fednorms.engines.graphs.layout import Layout, shapes_of
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

    def memory(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        ...

    def written(self) -> list[list[Tensor]]:
        """All tensors that a step changes, in groups that move at one scale."""
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
    compiling: bool = False  # steps become compiled programs before they are recorded
    allowance: float = math.inf  # seconds that compiling may still take
    compiled_for: float = 0.0  # seconds, until now
    programs: dict[tuple[object, ...], Program | None] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Tell the user something, once."""
        if text not in self.notes:
            self.notes.append(text)

    def phase(
        self, space: Space, outer: Carry, phase: Phase, number: int, clients: Sequence[Client], kept: Sequence[Tree]
    ) -> list[int]:
        """Take the steps of a phase and return how many images each client drops; `kept` is its momentum."""
        task = space.task
        outer.optimizer = optimizer = space.optimizer
        outer.active = task.net.trainable(phase.train, also_frozen=outer.context.evaluating)
        optimizer.lr.fill_(rate_of(outer.context, phase))
        optimizer.updates.zero_()
        if not (task.training.keep_momentum and number):
            zero(optimizer.first_moment)
        zero(optimizer.second_moment)
        if task.training.keep_momentum and not number:
            space.moments(kept)
        plans, firsts, dropped = [], [], []
        for client in clients:
            seed = seed_of("data", task.seed, outer.context.round, client.name, number)
            plan, lost = batch_plan(len(client.data), task.training, phase, seed, needs_two=task.needs_two)
            plans.append(plan)
            firsts.append(self.data.first.get(client.name, 0))
            dropped.append(lost)
        empty = space.count - len(plans)  # of a stack: these rows repeat the last client
        plans, first = plans + plans[-1:] * empty, torch.tensor(firsts + firsts[-1:] * empty)
        draws = range(phase.draws)
        groups = [[i + draw for draw in draws] for i in range(0, len(plans[0]) - phase.draws + 1, phase.draws)]
        shapes = [tuple(plans[0][i].numel() for i in group) for group in groups]
        ready: dict[tuple[int, ...], Captured] = {}
        for shape in dict.fromkeys(shapes):
            members = [g for g, s in zip(groups, shapes, strict=True) if s == shape]
            rows = [torch.stack([torch.cat([plan[g[draw]] for plan in plans]) for g in members]) for draw in draws]
            rows = [some + first.repeat_interleave(n) for some, n in zip(rows, shape, strict=True)]
            captured = ready[shape] = self._captured(space, outer, phase, shape, rows)
            self._count(outer, captured.names, len(members))
        for shape in shapes:
            ready[shape].run()
        return dropped

    def _count(self, outer: Carry, names: list[str], steps: int) -> None:
        outer.steps += steps
        outer.exchanged_steps += steps * (not set(outer.active).isdisjoint(self.task.net.sent_params))
        for name in names:
            outer.grad_steps[name] = outer.grad_steps.get(name, 0) + steps

    def _captured(
        self, space: Space, outer: Carry, phase: Phase, shape: tuple[int, ...], rows: list[Tensor]
    ) -> Captured:
        """The recorded step for batches of these sizes, which will read these rows."""
        key = (phase.train, phase.norm, shape, tuple(sorted(outer.path.items())))
        known = space.graphs.get(key)
        if known and len(known.plans[0]) >= len(rows[0]):
            self._plan(known.plans, known.at, rows)
            return known
        if known:
            self.device.forget(known.run)
        like = self.task.like
        # No client needs a longer plan than the largest.
        room = max(len(rows[0]), phase.steps or (phase.epochs or 1) * (self.data.longest // max(*shape, 1) + 1))
        plans = [torch.zeros(room, space.count * n, dtype=torch.long, device=like.device) for n in shape]
        at = torch.zeros(1, dtype=torch.long, device=like.device)
        self._plan(plans, at, rows)
        way = Way(outer.active, outer.path, outer.context)

        x, y = space.data or self.data.resident or (at, at)

        def one_step() -> None:
            rows = [plan.index_select(0, at).view(-1) for plan in plans]
            space.step([(x.index_select(0, r), y.index_select(0, r)) for r in rows], phase, way)
            at.add_(1)

        written = [*space.written(), [at]]
        saved = _copies(written)
        space.carry.grad_steps, space.carry.fresh = {}, True
        for _ in range(WARM_UPS):
            one_step()
            at.zero_()
        self.device.synchronize()
        moved = list(space.carry.grad_steps)  # read before recording, which may fail halfway through the step
        record = self.graph_of if space.count == 1 else self.device.record
        run = record(one_step, space.stream, space.pool)
        if self.compiling and run is not one_step:  # what cannot be recorded reads values that a trace would fix
            memory = list({id(t): t for t in (*space.memory(), at, x, y, *plans)}.values())
            faster = self._compiled(space, key, one_step, memory, written, saved)
            if faster:
                self.device.forget(run)
                run = faster
        _restore(written, saved)
        space.graphs[key] = Captured(run, plans, at, moved)
        self.captures += 1
        return space.graphs[key]

    def _plan(self, plans: list[Tensor], at: Tensor, rows: list[Tensor]) -> None:
        """Let the next steps read these rows."""
        for target, some in zip(plans, rows, strict=True):
            target[: len(some)].copy_(self.device.pinned(some), non_blocking=True)
        at.zero_()

    def _compiled(
        self, space: Space, key: tuple[object, ...], job: Job, memory: list[Tensor], written: Groups, saved: Groups
    ) -> Job | None:
        """The job as a recorded program; None if it cannot be one, with a note, or if the time left is too short."""
        trees = shapes_of(space.carry.broadcast.parts, space.carry.mine)
        key = (*key, space.task is self.data.task, repr(trees), *((t.shape, t.stride(), t.dtype) for t in memory))
        new, known = key not in self.programs, self.programs.get(key)
        if (self.allowance < seconds_to_compile()) if new else (known is None):
            return None
        started, self.programs[key] = time.perf_counter(), None
        try:
            program = known or compiled(job, memory)
            run = program.on(memory)
            if new:
                found, expected = _after(run, written, saved), _after(job, written, saved)
                if not agree(found, expected, _after(job, written, rounded(saved)), saved):
                    raise ValueError("the compiled step gave other results")
            for _ in range(WARM_UPS):
                _after(run, written, saved)
            self.device.synchronize()
            recorded = self.device.record(run, space.stream, space.pool)
            self.programs[key] = program
            return recorded
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise whatever they like, and a step without them is as good
            self.device.synchronize()
            self.note(f"steps are not compiled: {first_line(error)}")
            return None
        finally:
            self.compiled_for += time.perf_counter() - started
            self.allowance -= time.perf_counter() - started

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


def _copies(tensors: Groups) -> Groups:
    return [[t.detach().clone() for t in group] for group in tensors]


def _restore(tensors: Groups, values: Groups) -> None:
    with torch.no_grad():
        for group, some in zip(tensors, values, strict=True):
            if group:
                torch._foreach_copy_(list(group), list(some))


def _after(job: Job, written: Groups, start: Groups) -> Groups:
    """The tensors that two steps from these values leave behind: the second one reads what the first one wrote.

    Torch's random numbers are the same each time.
    """
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        _restore(written, start)
        job()
        _restore(written[-1:], start[-1:])  # the place in the plan, which may have one row
        job()
    return _copies(written)


def first_line(error: BaseException) -> str:
    r"""What an error says first.

    >>> first_line(RuntimeError("No kernel for this.\nCompile with more."))
    'No kernel for this.'
    """
    first = error.__context__ or error  # ending a failed capture raises again
    return (str(first).strip() or type(first).__name__).splitlines()[0]
