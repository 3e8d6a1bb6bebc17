"""The fast engine: each client's local step is a CUDA graph, and several clients run side by side on streams.

A workspace is fixed memory for the carry of one client. `step` is captured once per code path and batch shape. A round
copies a client into a workspace, replays the graph once per step on the workspace's stream, and copies the result out.
The host only launches work; it does not wait for the device until the round is over.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.batches import batch_plan
from fednorms.core.error_origin import culprit
from fednorms.core.errors import Diverged, RunFailed
from fednorms.core.net import Net
from fednorms.core.noise import seed_of
from fednorms.core.part import Part, Pass, Phase
from fednorms.core.reductions import reductions
from fednorms.core.round import (
    arrive,
    base_phases,
    diagnose,
    finish,
    moved,
    rate_of,
    recipe_phase,
    start_of_twin,
    step,
)
from fednorms.core.states import Broadcast, Carry, Client, ClientState, Task, Upload, context_of
from fednorms.core.tree import Packed, Tree, branch, join
from fednorms.data import Federation, Split
from fednorms.engines.base import DEFAULTS, EngineSettings, Trained
from fednorms.engines.graphs.capture import WARM_UPS, Device, Job, device_of
from fednorms.engines.graphs.data import DeviceData
from fednorms.engines.graphs.evaluation import Evaluator, RandomOutputs, SiteModel
from fednorms.engines.graphs.layout import Layout, copy_tree
from fednorms.engines.graphs.pending import PendingResults
from fednorms.engines.graphs.stack import Arrived, Stack, apart
from fednorms.engines.graphs.workspace import Captured, Workspace, zero
from fednorms.engines.local import LocalEngine
from fednorms.engines.loop import train_in_turn
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import Mode, model_for
from fednorms.evaluation.scores import SiteScore

WAITS, PAUSE = 20, 15.0  # how often, and for how many seconds, a run waits for memory that other processes hold
TRIED = (8, 16, 4)  # numbers of streams, each timed for one round; results do not depend on them
STACKED_PIXELS = 2**16  # of a batch: larger ones fill a card anyway, so they are not stacked
MOST_STACKED = 64
STACK_BYTES = 2**32  # for the tensors of a stack that are as large as the model, of which there are about six


class Grouping(NamedTuple):
    """How many clients take their steps together, and how many such groups run side by side."""

    together: int
    streams: int


class Graphs(LocalEngine):
    """Runs clients as CUDA graphs on streams.

    `streams` fixes how many run side by side (0: found by trial), and then `together` how many take their steps
    together.
    """

    name: ClassVar[str] = "graphs"

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        settings: EngineSettings = DEFAULTS,
        streams: int = 0,
        together: int = 1,
        device: Device | None = None,
    ) -> None:
        super().__init__(task, training, testing, store, settings)
        self.device = device or device_of(task.like.device, settings.memory)
        self.layout = Layout(task.net.initial, task.net.exchanged)
        self.stream_count = streams or TRIED[0]
        self.fixed = streams > 0
        self.stackable = not task.twin and not task.method.writing  # a second model, and state that steps change
        self.trials: dict[Grouping, float] = {}  # seconds per client
        self.workspaces: dict[int, Workspace] = {}
        self.together = together  # clients that take their steps together
        self.stacks: dict[int, Stack] = {}
        self.streams: list[Any] = []
        self.captures = 0
        self.evaluator: Evaluator | None = None
        self.data = DeviceData(task, self.local, self.device)
        self.room = self.device.free_memory() // 4  # for results that wait until a round is over
        self.in_turn = False  # no memory for graphs: clients train one after the other

    # -- tests --------------------------------------------------------------------------------------------------
    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        """Test a mode at sites; those that test the same tensors share batches."""
        sites = self.local.tested_sites
        evaluator, splits = self._evaluator(), {name: sites[name].splits[split] for name in jobs}
        images = evaluator.images(list(splits.values())) if mode.batch_size(self.task) is None else None
        if images is not None:
            try:
                found = evaluator.scores(self._site_models(evaluator, jobs, splits, mode), images)
                return dict(zip(jobs, found, strict=True))
            except RandomOutputs as why:
                self._note(str(why))
            except torch.OutOfMemoryError:
                self._without_evaluator()
        return {name: self.score_site(name, sent, split, mode) for name, sent in jobs.items()}

    def _without_evaluator(self) -> None:
        """Free what recorded tests hold: sites are tested one by one."""
        self._free()
        self._note("out of memory: sites are tested one by one, without graphs")

    @override
    def score_site(self, name: str, sent: Broadcast, split: str, mode: Mode) -> SiteScore:
        site = self.local.tested_sites[name]
        return self.local.score(sent, site, self.data.test(site.splits[split]), mode)

    def _site_models(
        self, evaluator: Evaluator, jobs: Mapping[str, Broadcast], splits: Mapping[str, Split], mode: Mode
    ) -> Iterator[SiteModel]:
        for name, sent in jobs.items():
            if evaluator.shared(mode):
                yield SiteModel(sent, Client(name, splits[name]), sent.model, {})
                continue
            client = self.local.at_test(self.local.tested_sites[name], self.data.test(splits[name]))
            sent = mode.received(sent, name)
            self.device.mark_used(_tensors(client.state), evaluator.stream)
            # Only fine-tuning can draw from torch's own generator.
            with self.local.seeded("test", sent.round, name) if mode.model == "adapted" else nullcontext():
                model, mine = model_for(self.task, sent, client, mode)
            yield SiteModel(sent, client, model, mine)

    def _score_uploads(
        self, sent: Broadcast, trained: Sequence[tuple[str, Upload, ClientState]]
    ) -> dict[str, SiteScore]:
        """Test clients right after local training."""
        local = self.local
        tested = [
            (replace(local.client(name), state=state), upload, test)
            for name, upload, state in trained
            if (test := local.sites[name].test) is not None
        ]
        evaluator = self._evaluator()
        images = evaluator.images([test for _, _, test in tested]) if tested else None
        if images is not None:
            after = ((c, local.model_after(sent, c, upload)) for c, upload, _ in tested)
            models = (SiteModel(here, c, model, mine) for c, (here, model, mine) in after)
            try:
                return dict(zip([c.name for c, _, _ in tested], evaluator.scores(models, images), strict=True))
            except RandomOutputs as why:
                self._note(str(why))
        return {c.name: local.score_upload(sent, c, upload, self.data.test(test)) for c, upload, test in tested}

    def _evaluator(self) -> Evaluator:
        if self.evaluator is None:
            classes = self.local.testing.num_classes
            self.evaluator = Evaluator(self.task, self.layout, self.device, classes, self._graph_of)
        return self.evaluator

    # -- a round ------------------------------------------------------------------------------------------------
    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        """Run an extra pass at clients, one after the other and eagerly."""
        return self.local.measure(p, job, sent, names)

    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        """Train the clients of a cohort on streams; results are those of the loop.

        Without memory, a round starts again: with half of the streams, then when other processes have given memory
        back, then without graphs. Nothing of a failed round has been kept.
        """
        waits = 0
        while not self.in_turn:
            try:
                return self._train(sent, cohort, score=score)
            except torch.OutOfMemoryError:
                pass
            except RunFailed:
                raise
            except RuntimeError as error:
                if self.together == 1:
                    raise
                self._without_stacks(f"clients take their steps one by one: {_first_line(error)}")
                continue
            self._free()
            if self.together > 1:
                self._without_stacks(
                    "out of memory: clients take their steps one by one, and the last digits of results may differ "
                    "from those of a run with more memory"
                )
            elif self.stream_count > 1:
                self.stream_count //= 2
                self.fixed = True
                self._note(f"out of memory: continued with {self.stream_count} clients side by side")
            elif waits < WAITS and self.device.held_by_others():
                waits += 1
                self._note("out of memory: other processes hold the device's memory, so the run waited for them")
                time.sleep(PAUSE)
            else:
                self.in_turn = True
                self._note("out of memory: clients train one after the other, without graphs")
        try:
            return train_in_turn(self, sent, cohort, score=score)
        except torch.OutOfMemoryError:
            raise RunFailed(
                'The device has no memory for a single client. Choose a smaller batch_size or model, or device="cpu".'
            ) from None

    @override
    def close(self) -> None:
        """Give all memory on the device back; a later call takes it again."""
        self._free()

    def _free(self) -> None:
        self.device.synchronize()
        for space in self.workspaces.values():
            space.close(self.device)
        for stack in self.stacks.values():
            stack.close(self.device)
        self.workspaces.clear()
        self.stacks.clear()
        if self.evaluator is not None:
            self.evaluator.close()
            self.evaluator = None
        self.data.close()
        self.device.empty_cache()

    def _train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool) -> Trained:
        started, captures = time.perf_counter(), self.captures
        done = Trained([])
        self.data.load()
        if not self.fixed and not self.trials:
            self.together, self.stream_count = self._candidates(len(cohort))[0]
        packed = self._pack(sent.model)
        self.streams = [self.device.stream(number) for number in range(self.stream_count)]
        self.device.fork(self.streams)
        room = sys.maxsize if score else self.room  # what is tested next stays on the device
        whole = frozenset(name for name, how in reductions(self.task).items() if how in ("list", "grouped"))
        pending = PendingResults(room, self.device, self.task.like.device, whole)
        finite: list[Tensor] = []
        order: list[str] = []  # of training
        for number, names in enumerate(self._groups(sent, cohort)):
            clients, here = [self.local.client(name) for name in names], number % self.stream_count
            with self.device.on(self.streams[here]):
                if len(names) > 1:
                    results, good = self._several(here, sent, clients)
                else:
                    results = [self._one(here, sent, packed, clients[0])]
                    good = self._finite(results)
                finite.append(good)
            for client, (upload, state) in zip(clients, results, strict=True):
                # The store may free the memory of a state before the stream has read it.
                self.device.mark_used(_tensors(client.state), self.streams[here])
                pending.add(client.name, upload, state)
            order += names
        self.device.join(self.streams)
        fine = torch.cat(finite).tolist() if finite else []  # only here the host waits
        if self.captures == captures:
            self._learn(len(cohort), time.perf_counter() - started)
        for name, good in zip(order, fine, strict=True):
            if not good:
                try:
                    diagnose(self.task, sent, self.local.client(name))
                except Diverged as error:
                    if self.settings.on_divergence == "stop":
                        raise
                    done.diverged[name] = str(error)
        if score:
            done.after_local = self._score_uploads(sent, list(pending.results(fine)))
        for name, upload, state in pending.results(fine):
            done.uploads.append(upload)
            self.local.keep(name, state)
        place = {name: k for k, name in enumerate(cohort)}
        done.uploads.sort(key=lambda upload: place[upload.client])
        return done

    def _without_stacks(self, why: str) -> None:
        self._note(why)
        self._free()
        self.stackable, self.together, self.stream_count = False, 1, TRIED[0]
        self.trials = {g: seconds for g, seconds in self.trials.items() if g.together == 1}

    def _candidates(self, clients: int) -> list[Grouping]:
        """The groupings to try; the first one runs the first round.

        Numbers of streams change no bits. Numbers of clients that take their steps together change rounding, and a
        trial may choose another one the next time: a repeatable run does not try them.
        """
        slots = [Grouping(1, count) for count in TRIED]
        pixels = self.task.training.batch_size * math.prod(self.local.testing.stored_shape[1:])
        if not self.stackable or torch.backends.cudnn.deterministic or pixels > STACKED_PIXELS:
            return slots
        most = min(MOST_STACKED, STACK_BYTES // max(6 * self.layout.size * self.task.like.element_size(), 1))
        stacks = [Grouping(_even(clients, min(most, -(-clients // n))), n) for n in (1, 2, 4)]
        return slots + [g for g in stacks if g.together > 1]

    def _learn(self, clients: int, seconds: float) -> None:
        """Try groupings, a round each, as far as memory and cohort allow, and keep the fastest."""
        candidates = self._candidates(clients)
        if self.fixed or all(g in self.trials for g in candidates):
            return
        self.trials[Grouping(self.together, self.stream_count)] = seconds / clients
        held = max(len(self.workspaces) + self.together * len(self.stacks), 1)  # clients whose memory is there
        used, room = self.device.used_memory() / held, self.device.free_memory()
        for g in candidates:
            if g not in self.trials:
                there = len(self.workspaces) if g.together == 1 else 0
                enough = g.together > 1 or g.streams < clients or g.streams < self.stream_count
                if (g.together * g.streams - there) * used < 0.8 * room and enough:
                    self._regroup(g)
                    return
                self.trials[g] = math.inf
        self._regroup(min(candidates, key=lambda g: self.trials[g]))
        for number in [n for n in self.workspaces if self.together > 1 or n >= self.stream_count]:
            self.workspaces.pop(number).close(self.device)
        for number in [n for n in self.stacks if n >= self.stream_count]:
            self.stacks.pop(number).close(self.device)
        self.device.empty_cache()

    def _regroup(self, grouping: Grouping) -> None:
        if grouping.together != self.together:
            for space in self.stacks.values():
                space.close(self.device)
            self.stacks.clear()
        self.together, self.stream_count = grouping

    def _finite(self, results: list[tuple[Upload, ClientState]]) -> Tensor:
        """Whether the results of each client are finite, as a tensor: the host does not wait."""
        return torch.stack([_all_finite(moved(self.task, *result), self.task.like) for result in results])

    def _groups(self, sent: Broadcast, cohort: Sequence[str]) -> list[list[str]]:
        """The clients that are trained together: those that take the same steps on batches of the same sizes."""
        if self.together < 2 or not self.stackable or self.data.resident is None:
            return [[name] for name in cohort]
        alike: dict[object, list[str]] = {}
        for name in cohort:
            client = self.local.client(name)
            context = context_of(self.task, sent.round, client)
            phases, path = base_phases(self.task, context), self.task.method.path(context)
            key = (len(client.data), repr(phases), tuple(sorted(path.items())))
            alike.setdefault(key, []).append(name)
        groups: list[list[str]] = []
        for names in alike.values():
            for i in range(0, len(names), self.together):
                some = names[i : i + self.together]  # a stack has a fixed size, so a few clients would leave it empty
                groups += [some] if 4 * len(some) > self.together else [[name] for name in some]
        return groups

    def _pack(self, model: Tree) -> Tensor:
        block = self.layout.block(self.task.like)
        copy_tree(self.layout.views(block), model)
        return block

    def _one(self, number: int, sent: Broadcast, packed: Tensor, client: Client) -> tuple[Upload, ClientState]:
        task, common, sent = self.task, sent.model, sent.to(client.name)
        context = context_of(task, sent.round, client)
        mine, model, early = arrive(task, sent, client, context)
        path = task.method.path(context)
        seen = {**mine, task.twin.name: Tree()} if task.twin else mine  # the second model has its own workspace
        space = self._workspace(number, sent, client, seen, model)
        space.fill(sent, common, packed, seen, model)
        self.data.fill(space, client)
        space.reset(context)
        outer = replace(
            space.carry, client=client, context=context, broadcast=sent, mine=mine, path=path, grad_steps={}
        )
        outer.steps = outer.exchanged_steps = outer.dropped = 0
        outer.velocity = client.state.velocity if client.state else Tree()
        for count, phase in enumerate(base_phases(task, context)):
            self._phase(space, outer, phase, count)
        return self._leave(space, outer, early, model)

    def _leave(self, space: Workspace, outer: Carry, early: dict[str, Tree], model: Tree) -> tuple[Upload, ClientState]:
        """Copy the client out of the workspace and let the parts finish."""
        net, inner = self.task.net, space.carry
        after, block = space.model()
        outer.mine = {**outer.mine, **{p.name: inner.mine[p.name].clone() for p in self.task.method.writing}}
        outer.loss_sum, outer.grad_sum = inner.loss_sum.clone(), inner.grad_sum.clone()
        if self.task.training.keep_momentum:
            outer.optimizer = replace(space.optimizer, first_moment=space.optimizer.first_moment.clone())
        _hold(outer, after, model, net)
        twin = self._train_twin(space, outer) if self.task.twin else None
        return self._finish(outer, early, twin, block)

    def _finish(
        self, outer: Carry, early: dict[str, Tree], twin: Tree | None, block: Tensor
    ) -> tuple[Upload, ClientState]:
        upload, state = finish(self.task, outer, early, twin)
        state = replace(state, local=state.local.clone())  # a view would keep the whole block in memory
        if not self.task.method.changing:
            upload = replace(upload, model=Packed(upload.model, block[: self.layout.exchanged]))
        return upload, state

    def _train_twin(self, space: Workspace, outer: Carry) -> Tree:
        """Train the client's second model in its own workspace, as `train_twin` of the core does."""
        task, twin = self.task.for_twin, space.twin or self._twin_workspace(space, outer)
        start, kept = start_of_twin(self.task, outer.mine), outer.mine[self.task.twin.name if self.task.twin else ""]
        twin.origin.copy_(space.origin)
        twin.live.copy_(space.origin)
        copy_tree({n: t for n, t in self.layout.views(twin.live).items() if n in start}, start)
        copy_tree(twin.integers, {**outer.start_buffers, **start})
        twin.reset(outer.context)
        v = replace(twin.carry, client=outer.client, context=outer.context, path=outer.path, grad_steps={})
        v.velocity = branch(kept, "v")
        self._phase(twin, v, recipe_phase(task, outer.context), 0)
        after, _ = twin.model()
        moments = twin.optimizer.first_moment.clone() if task.training.keep_momentum else Tree()
        return join(model=after.pick(start), v=moments)

    def _twin_workspace(self, space: Workspace, outer: Carry) -> Workspace:
        same, model = space.carry, Tree({**outer.start, **outer.fixed, **outer.start_buffers})
        new, pool = (outer.client, same.broadcast, same.mine, model), self.device.pool()
        space.twin = Workspace.new(self.data.task.for_twin, self.layout, *new, space.stream, pool, space.data)
        return space.twin

    # -- clients that take their steps together ---------------------------------------------------------------------
    def _several(
        self, number: int, sent: Broadcast, clients: Sequence[Client]
    ) -> tuple[list[tuple[Upload, ClientState]], Tensor]:
        task, arrived = self.task, []
        for client in clients:
            here, context = sent.to(client.name), context_of(task, sent.round, client)
            mine, model, early = arrive(task, here, client, context)
            arrived.append(Arrived(client, context, here, mine, model, early))
        space = self._stack(number, arrived[0])
        space.fill(sent, sent.model, arrived)
        first = arrived[0]
        outer = replace(space.carry, context=first.context, path=task.method.path(first.context), grad_steps={})
        outer.steps = outer.exchanged_steps = 0
        dropped = [0] * len(arrived)
        for count, phase in enumerate(base_phases(task, first.context)):
            self._phase_together(space, outer, phase, count, arrived, dropped)
        after, blocks = space.models()
        losses, sums = space.carry.loss_sum.clone().unbind(0), apart(space.carry.grad_sum.clone(), space.count)
        kept = task.training.keep_momentum
        moments = apart(space.optimizer.first_moment.clone(), space.count) if kept else []
        results = []
        for k, a in enumerate(arrived):
            own = replace(outer, client=a.client, context=a.context, broadcast=a.sent, mine=a.mine, dropped=dropped[k])
            own.loss_sum, own.grad_sum = losses[k], sums[k]
            if kept:
                own.optimizer = replace(space.optimizer, first_moment=moments[k])
                own.velocity = a.client.state.velocity if a.client.state else Tree()
            _hold(own, after[k], a.model, task.net)
            results.append(self._finish(own, a.early, None, blocks[k]))
        good = torch.isfinite(blocks).all(1) & torch.isfinite(space.carry.loss_sum)
        if not all(isinstance(upload.model, Packed) and not any(upload.parts.values()) for upload, _ in results):
            return results, good[: len(results)] & self._finite(results)
        return results, good[: len(results)]

    def _stack(self, number: int, first: Arrived) -> Stack:
        known = self.stacks.get(number)
        if known and known.fits(first.sent, first.mine):
            return known
        if known:
            known.close(self.device)
        memory = (self.streams[number], self.device.pool())
        self.stacks[number] = Stack.new(
            self.data.task, self.layout, self.together, first, *memory, addressed=bool(self.task.method.addressing)
        )
        return self.stacks[number]

    def _phase_together(
        self, space: Stack, outer: Carry, phase: Phase, number: int, arrived: Sequence[Arrived], dropped: list[int]
    ) -> None:
        task, optimizer = space.task, space.optimizer
        outer.active = task.net.trainable(phase.train)
        optimizer.lr.fill_(rate_of(outer.context, phase))
        optimizer.updates.zero_()
        if not (task.training.keep_momentum and number):
            zero(optimizer.first_moment)
        zero(optimizer.second_moment)
        if task.training.keep_momentum and not number:
            space.moments(arrived)
        plans = []
        for k, a in enumerate(arrived):
            seed = seed_of("data", task.seed, a.context.round, a.client.name, number)
            plan, lost = batch_plan(len(a.client.data), task.training, phase, seed, needs_two=task.needs_two)
            dropped[k] += lost
            first = self.data.first[a.client.name]
            plans.append([rows + first for rows in plan])
        plans += [plans[-1]] * (space.count - len(plans))
        steps = len(plans[0]) // phase.draws
        groups = [tuple(range(i * phase.draws, (i + 1) * phase.draws)) for i in range(steps)]
        shapes = [tuple(plans[0][i].numel() for i in group) for group in groups]
        ready: dict[tuple[int, ...], Captured] = {}
        for shape in dict.fromkeys(shapes):
            members = [g for g, s in zip(groups, shapes, strict=True) if s == shape]
            captured = ready[shape] = self._captured_together(space, outer, phase, shape, len(members))
            for draw, target in enumerate(captured.plans):
                rows = torch.stack([torch.cat([plan[g[draw]] for plan in plans]) for g in members])
                target[: len(members)].copy_(self.device.pinned(rows), non_blocking=True)
            captured.at.zero_()
            self._count(outer, captured.names, len(members))
        for shape in shapes:
            ready[shape].run()

    def _captured_together(
        self, space: Stack, outer: Carry, phase: Phase, shape: tuple[int, ...], steps: int
    ) -> Captured:
        key = (phase.train, phase.norm, shape, tuple(sorted(outer.path.items())))
        known = space.graphs.get(key)
        if known and len(known.plans[0]) >= steps:
            return known
        like = {"dtype": torch.long, "device": self.task.like.device}
        plans = [torch.zeros(steps, space.count * n, **like) for n in shape]  # type: ignore[call-overload]
        at = torch.zeros(1, **like)  # type: ignore[call-overload]
        assert self.data.resident
        x, y = self.data.resident
        common = replace(outer, active=list(outer.active))

        def one_step() -> None:
            rows = [plan.index_select(0, at).view(-1) for plan in plans]
            batches = [tuple(t.index_select(0, r).unflatten(0, (space.count, -1)) for t in (x, y)) for r in rows]
            space.step(batches, phase, common)  # type: ignore[arg-type]
            at.add_(1)

        saved = [(t, t.detach().clone()) for t in space.written()]
        space.carry.grad_steps, space.carry.fresh = {}, True
        for _ in range(WARM_UPS):
            one_step()
            at.zero_()
        self.device.synchronize()
        trained = list(space.carry.grad_steps)
        run = self.device.record(one_step, space.stream, space.pool)
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
        space.graphs[key] = Captured(run, plans, at, trained)
        self.captures += 1
        return space.graphs[key]

    # -- workspaces and graphs ----------------------------------------------------------------------------------
    def _workspace(self, number: int, sent: Broadcast, client: Client, mine: dict[str, Tree], model: Tree) -> Workspace:
        known = self.workspaces.get(number)
        if known and known.fits(sent, mine):
            return known
        if known:  # what parts send or keep has changed its shape
            known.close(self.device)
        own = {k: v.clone() for k, v in mine.items()}
        copied = replace(sent, parts={k: v.clone() for k, v in sent.parts.items()})
        new, memory = (client, copied, own, model), (self.streams[number], self.device.pool(), self.data.room())
        self.workspaces[number] = Workspace.new(self.data.task, self.layout, *new, *memory)
        return self.workspaces[number]

    def _phase(self, space: Workspace, outer: Carry, phase: Phase, number: int) -> None:
        task, client, optimizer = space.task, outer.client, space.optimizer
        outer.active = task.net.trainable(phase.train, also_frozen=outer.context.evaluating)
        optimizer.lr.fill_(rate_of(outer.context, phase))
        optimizer.updates.zero_()
        if not (task.training.keep_momentum and number):
            zero(optimizer.first_moment)
        zero(optimizer.second_moment)
        if task.training.keep_momentum and not number:
            copy_tree(optimizer.first_moment, outer.velocity)
        seed = seed_of("data", task.seed, outer.context.round, client.name, number)
        plan, dropped = batch_plan(len(client.data), task.training, phase, seed, needs_two=task.needs_two)
        outer.dropped += dropped
        groups = [plan[i : i + phase.draws] for i in range(0, len(plan) - phase.draws + 1, phase.draws)]
        shapes = [tuple(rows.numel() for rows in group) for group in groups]
        first = self.data.first.get(client.name, 0)
        ready: dict[tuple[int, ...], Captured] = {}
        for shape in dict.fromkeys(shapes):
            members = [g for g, s in zip(groups, shapes, strict=True) if s == shape]
            captured = ready[shape] = self._captured(space, outer, phase, shape, len(members))
            for draw, target in enumerate(captured.plans):
                rows = torch.stack([g[draw] for g in members]).add_(first)
                target[: len(members)].copy_(self.device.pinned(rows), non_blocking=True)
            captured.at.zero_()
            self._count(outer, captured.names, len(members))
        for shape in shapes:
            ready[shape].run()

    def _count(self, outer: Carry, names: list[str], steps: int) -> None:
        outer.steps += steps
        outer.exchanged_steps += steps * (not set(outer.active).isdisjoint(self.task.net.sent_params))
        for name in names:
            outer.grad_steps[name] = outer.grad_steps.get(name, 0) + steps

    def _captured(self, space: Workspace, outer: Carry, phase: Phase, shape: tuple[int, ...], steps: int) -> Captured:
        key = (phase.train, phase.norm, shape, tuple(sorted(outer.path.items())))
        known = space.graphs.get(key)
        if known and len(known.plans[0]) >= steps:
            return known
        inner = space.carry
        # No client needs a longer plan than the largest.
        room = phase.steps or (phase.epochs or 1) * (self.data.longest // max(*shape, 1) + 1)
        plans = [torch.zeros(max(steps, room), n, dtype=torch.long, device=self.task.like.device) for n in shape]
        at = torch.zeros(1, dtype=torch.long, device=self.task.like.device)
        names, path = outer.active, outer.path
        # What differs between clients and rounds is a tensor inside the graph.
        context = replace(outer.context, lr=space.lr, relative=space.relative)  # type: ignore[arg-type]

        def one_step() -> None:
            inner.active, inner.path, inner.context = names, path, context
            active = set(names)
            for name, tensor in inner.params.items():
                tensor.requires_grad_(name in active)
            x, y = space.data or self.data.resident or (at, at)
            rows = [plan.index_select(0, at).view(-1) for plan in plans]
            step(space.task, inner, [(x.index_select(0, r), y.index_select(0, r)) for r in rows], phase)
            at.add_(1)

        saved = [(t, t.clone()) for t in space.written()]
        inner.grad_steps, inner.fresh = {}, True
        for _ in range(WARM_UPS):
            one_step()
            at.zero_()
        self.device.synchronize()
        moved = list(inner.grad_steps)  # read before recording, which may fail halfway through the step
        run = self._graph_of(one_step, space.stream, space.pool)
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
        space.graphs[key] = Captured(run, plans, at, moved)
        self.captures += 1
        return space.graphs[key]

    def _graph_of(self, job: Job, stream: object, pool: object) -> Job:
        """A job as a graph; if it cannot be captured, the job itself, with a note that says which part and why."""
        try:
            return self.device.record(job, stream, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.device.synchronize()
            found = culprit(error)
            who = f"{found[0]} ({found[1]})" if found else "the model"
            self._note(f"{who} cannot be captured in a CUDA graph and runs eagerly: {_first_line(error)}")
            return job

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _hold(outer: Carry, after: Tree, model: Tree, net: Net) -> None:
    """Give a client's carry its trained model, and the one that it started from."""
    params, fixed = list(outer.params), list(outer.fixed)
    outer.params, outer.fixed, outer.buffers = after.pick(params), after.pick(fixed), after.pick(net.buffers)
    outer.start, outer.start_buffers = model.pick(params), model.pick(net.buffers)


def _even(clients: int, most: int) -> int:
    """The size of groups of at most `most` clients that are about equally large.

    >>> _even(50, 64), _even(50, 30), _even(10, 4)
    (50, 25, 4)
    """
    return -(-clients // -(-clients // max(most, 1)))


def _tensors(state: ClientState | None) -> list[Tensor]:
    trees = [state.local, state.velocity, *state.parts.values()] if state else []
    return [t for tree in trees for t in tree.values()]


def _first_line(error: BaseException) -> str:
    first = error.__context__ or error  # ending a failed capture raises again
    return str(first).strip().splitlines()[0]


def _all_finite(trees: list[Tree], like: Tensor) -> Tensor:
    blocks = [tree.block for tree in trees if isinstance(tree, Packed)]
    loose = [t for tree in trees if not isinstance(tree, Packed) for t in tree.values() if t.is_floating_point()]
    checks = [torch.isfinite(t).all() for t in (*blocks, *loose) if t.numel()]
    return torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=like.device)
