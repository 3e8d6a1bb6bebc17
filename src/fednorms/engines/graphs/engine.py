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
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.errors import Diverged, RunFailed
from fednorms.core.part import Part, Pass
from fednorms.core.reductions import reductions
from fednorms.core.round import diagnose
from fednorms.core.states import Broadcast, Client, ClientState, Task, Upload
from fednorms.core.tree import Tree
from fednorms.data import Federation, Split
from fednorms.engines.base import DEFAULTS, EngineSettings, Trained
from fednorms.engines.graphs.capture import Device, device_of
from fednorms.engines.graphs.data import DeviceData
from fednorms.engines.graphs.evaluation import Evaluator, RandomOutputs, SiteModel
from fednorms.engines.graphs.fused import can_compile, seconds_to_compile
from fednorms.engines.graphs.grouping import FIRST, Grouping, Trials
from fednorms.engines.graphs.layout import Layout
from fednorms.engines.graphs.pending import PendingResults
from fednorms.engines.graphs.slots import Slots
from fednorms.engines.graphs.stacks import Stacks
from fednorms.engines.graphs.steps import Steps, first_line
from fednorms.engines.local import LocalEngine
from fednorms.engines.loop import train_in_turn
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import Mode, model_for
from fednorms.evaluation.scores import SiteScore

WAITS, PAUSE = 20, 15.0  # how often, and for how many seconds, a run waits for memory that other processes hold


class Graphs(LocalEngine):
    """Runs clients as CUDA graphs on streams.

    `streams` fixes how many run side by side (0: found by trial), and then `together` how many take their steps
    together, and `compiled` whether steps are compiled.
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
        compiled: bool = False,
        device: Device | None = None,
    ) -> None:
        super().__init__(task, training, testing, store, settings)
        self.device = device or device_of(task.like.device, settings.memory)
        self.data = DeviceData(task, self.local, self.device)
        self.steps = Steps(task, Layout(task.net.initial, task.net.exchanged), self.data, self.device, self.notes)
        self.slots, self.stacks = Slots(self.steps), Stacks(self.steps)
        self.fixed = streams > 0
        pixels = task.training.batch_size * math.prod(testing.stored_shape[1:])
        stackable = not task.twin and not task.method.writing  # a second model, and state that steps change
        self.trials = Trials(pixels, self.steps.layout.size * task.like.element_size(), stackable)
        self.grouping = Grouping(together if stackable else 1, streams, compiled) if self.fixed else FIRST
        self.evaluator: Evaluator | None = None
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
                self.steps.note(str(why))
            except torch.OutOfMemoryError:
                self._without_evaluator()
        return {name: self.score_site(name, sent, split, mode) for name, sent in jobs.items()}

    def _without_evaluator(self) -> None:
        """Free what recorded tests hold: sites are tested one by one."""
        self._free()
        self.steps.note("out of memory: sites are tested one by one, without graphs")

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
                self.steps.note(str(why))
        return {c.name: local.score_upload(sent, c, upload, self.data.test(test)) for c, upload, test in tested}

    def _evaluator(self) -> Evaluator:
        if self.evaluator is None:
            classes = self.local.testing.num_classes
            self.evaluator = Evaluator(self.task, self.steps.layout, self.device, classes, self.steps.graph_of)
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
                if self.grouping.together == 1:
                    raise
                self._without_stacks(f"clients take their steps one by one: {first_line(error)}")
                continue
            self._free()
            if self.grouping.compiled:
                self.trials.seconds[self.grouping] = math.inf
                self.grouping = self.grouping._replace(compiled=False)
                self.steps.note("out of memory: steps are not compiled")
            elif self.grouping.together > 1:
                self._without_stacks(
                    "out of memory: clients take their steps one by one, and the last digits of results may differ "
                    "from those of a run with more memory"
                )
            elif self.grouping.streams > 1:
                self.grouping, self.fixed = Grouping(1, self.grouping.streams // 2), True
                self.steps.note(f"out of memory: continued with {self.grouping.streams} clients side by side")
            elif waits < WAITS and self.device.held_by_others():
                waits += 1
                self.steps.note("out of memory: other processes hold the device's memory, so the run waited for them")
                time.sleep(PAUSE)
            else:
                self.in_turn = True
                self.steps.note("out of memory: clients train one after the other, without graphs")
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
        self._keep(Grouping(1, 0))
        self.steps.programs.clear()
        if self.evaluator is not None:
            self.evaluator.close()
            self.evaluator = None
        self.data.close()
        self.device.empty_cache()

    def _train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool) -> Trained:
        started, captures = time.perf_counter(), self.steps.captures
        done, task = Trained([]), self.task
        self.data.load()
        packed = self.slots.receive(sent)
        together, count, self.steps.compiling = self.grouping
        streams = self.steps.streams = [self.device.stream(number) for number in range(count)]
        self.device.fork(streams)
        room = sys.maxsize if score else self.room  # what is tested next stays on the device
        whole = frozenset(name for name, how in reductions(task).items() if how in ("list", "grouped"))
        pending = PendingResults(room, self.device, task.like.device, whole)
        finite: list[Tensor] = []
        order: list[str] = []  # of training
        groups = self.stacks.groups(sent, cohort, self.local.client, together)
        for number, names in enumerate(groups):
            clients, here = [self.local.client(name) for name in names], number % count
            with self.device.on(streams[here]):
                if len(clients) > 1:
                    results, good = self.stacks.run(here, sent, clients, together)
                else:
                    results, good = self.slots.run(here, sent, packed, clients[0])
                finite.append(good)
            for client, (upload, state) in zip(clients, results, strict=True):
                # The store may free the memory of a state before the stream has read it.
                self.device.mark_used(_tensors(client.state), streams[here])
                pending.add(client.name, upload, state)
            order += names
        self.device.join(streams)
        fine = torch.cat(finite).tolist() if finite else []  # only here the host waits
        if self.steps.captures == captures and not self.fixed:
            self._learn(len(cohort), time.perf_counter() - started, task.rounds - sent.round - 1)
        for name, good in zip(order, fine, strict=True):
            if not good:
                try:
                    diagnose(task, sent, self.local.client(name))
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
        self.steps.note(why)
        self._free()
        self.trials.without_stacks()
        self.grouping = FIRST

    def _learn(self, clients: int, seconds: float, rounds: int) -> None:
        """Try groupings, a round each, as far as memory and cohort allow, and keep the fastest.

        Compiling may take a quarter of the time that the rest of the run needs without it.
        """
        steps, trials = self.steps, self.trials
        trials.clients = max(trials.clients, clients)
        steps.allowance = trials.left(clients, rounds) / 4 - steps.compiled_for
        compiling = steps.allowance > seconds_to_compile() and can_compile(self.task.like.device)
        if trials.done(compiling=compiling):
            return
        slots = len(self.slots.spaces)
        held = max(slots + self.grouping.together * len(self.stacks.spaces), 1)  # clients whose memory is there
        used, room = self.device.used_memory() / held, self.device.free_memory()

        def fits(g: Grouping) -> bool:
            there = slots if g.together == 1 else 0
            return (g.together * g.streams - there) * used < 0.8 * room

        before = self.grouping
        self.grouping = trials.next(before, seconds / clients, compiling=compiling, fits=fits)
        if (self.grouping.together, self.grouping.compiled) != (before.together, before.compiled):
            self.stacks.keep(0)
        if self.grouping.compiled != before.compiled:
            self.slots.keep(0)
        if trials.done(compiling=compiling):
            self._keep(self.grouping)
            self.device.empty_cache()

    def _keep(self, grouping: Grouping) -> None:
        """Free the memory of clients that a grouping does not need."""
        self.slots.keep(grouping.streams if grouping.together == 1 else 0)
        self.stacks.keep(grouping.streams if grouping.together > 1 else 0)


def _tensors(state: ClientState | None) -> list[Tensor]:
    trees = [state.local, state.velocity, *state.parts.values()] if state else []
    return [t for tree in trees for t in tree.values()]
