"""Several GPUs on one machine: every device trains a share of the cohort, and the devices sum what clients sent.

The workers are those of the engine "workers", one per device, with the graph engine inside (on the CPU the loop). What
is averaged is summed in float64 on each device, then over all devices by all-reduce; only the total reaches the server.
The order of a sum therefore depends on the number of devices: results agree with one device up to rounding errors.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from fednorms.core.errors import BadInput, Diverged, RunFailed
from fednorms.core.reductions import is_count, reduce_uploads, reductions, upload_weights
from fednorms.core.states import Broadcast, ClientState, Combined, Task, Upload
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.base import DEFAULTS, EngineSettings, Trained
from fednorms.engines.graphs import Graphs
from fednorms.engines.local import LocalEngine
from fednorms.engines.loop import Loop
from fednorms.engines.states import ClientStates, InMemory
from fednorms.engines.workers.engine import States, Worker, Workers
from fednorms.engines.workers.pool import Pool

MODEL, EVEN = "@model", "@even"  # besides the parts' names: the mean model, and the one with equal weights
Shapes = dict[str, dict[str, tuple[int, ...]]]  # per sum: the shape of each tensor in it


def gpus(count: int = 0) -> list[str]:
    """Names of the first GPUs of this machine (0: all of them).

    >>> gpus(10**6)
    Traceback (most recent call last):
    fednorms.BadInput: 1000000 workers need 1000000 GPUs, but this machine has ...
    """
    found = torch.cuda.device_count()
    if count > found:
        raise BadInput(f"{count} workers need {count} GPUs, but this machine has {found}. Use fewer workers.")
    return [f"cuda:{number}" for number in range(count or found)]


@dataclass
class Report:
    """The result of a device's share of a cohort; `whole` has the tensors that are not summed, by client."""

    done: Trained  # with shapes in place of tensors that are summed
    states: States
    whole: dict[str, Upload]


class Rank(Worker):
    """A worker with its own device, which sums what clients sent together with the other workers."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.uploads: list[Upload] = []
        if device != "cpu":
            torch.cuda.set_device(device)

    def join(self, backend: str, ranks: dict[int, int], path: str, flags: tuple[bool, bool, bool, bool]) -> None:
        """Join the process group; `ranks` are by process id, `flags` set a GPU's precision and determinism."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")  # one machine
        dist.init_process_group(backend, init_method=f"file://{path}", rank=ranks[os.getpid()], world_size=len(ranks))
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags[:2]
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = flags[2:]

    @override
    def _engine(self, task: Task, settings: EngineSettings) -> LocalEngine:
        kind = Loop if self.device == "cpu" else Graphs
        return kind(task, self.training, self.testing, InMemory(), settings)

    def share(self, names: list[str], states: dict[str, ClientState | None], score: bool) -> Report:
        """Train a share of the cohort; what is to be summed stays here until `add_up`."""
        self._load_states(states)
        done = self.engine.train(self.broadcasts[0], names, score=score)
        if self.engine.task.method.individual:  # the server looks at each upload: nothing is summed here
            return Report(done, dict(self.engine.store.changed), {})
        self.uploads, summed = done.uploads, _summed(self.engine.task)
        first = min((u.client for u in self.uploads), default="")
        whole = {}
        for u in self.uploads:
            parts = {k: tree if k not in summed else _integers(tree, u.client == first) for k, tree in u.parts.items()}
            whole[u.client] = replace(u, model=_integers(u.model, u.client == first), parts=parts, metrics={})
        shapes = [
            replace(u, model=_shapes(u.model), parts={k: _shapes(t) for k, t in u.parts.items()}) for u in self.uploads
        ]
        return Report(replace(done, uploads=shapes), dict(self.engine.store.changed), whole)

    def add_up(self, shapes: Shapes, weights: dict[str, dict[str, float]]) -> Tensor | None:
        """Sum what clients sent over all devices; the first worker returns the sums in one tensor."""
        size = sum(n for group in shapes.values() for n in _sizes(group))
        total = torch.zeros(size, dtype=torch.float64, device=self.device)
        problem: Exception | None = None
        try:
            for u in self.uploads:
                trees, start = _trees(u), 0
                for name, group in shapes.items():
                    row = torch.cat([trees[name][k].reshape(-1).to(total) for k in group] or [total[:0]])
                    total[start : start + len(row)].add_(row, alpha=weights[name][u.client])
                    start += len(row)
        except Exception as error:  # the other workers wait for the all-reduce in any case
            problem = error
        dist.all_reduce(total)
        self.uploads = []
        if problem is not None:
            raise problem
        return total if dist.get_rank() == 0 else None


class Devices(Workers):
    """Trains a cohort on several devices of one machine: each trains a share of the clients, sums are all-reduced.

    Results agree with one device up to rounding errors. The parent keeps client states and sends them with the clients.
    """

    name: ClassVar[str] = "workers"

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        settings: EngineSettings = DEFAULTS,
        devices: Sequence[str] = (),
    ) -> None:
        super().__init__(task, training, testing, store, replace(settings, workers=len(devices)))
        self.devices = list(devices)

    @override
    def _parallel(self, jobs: int) -> bool:
        return self.count > 0 and jobs > 0

    @override
    def _new_pool(self) -> Pool:
        pool = Pool(Rank, self.devices, str(self.task.like.device))
        path = os.path.join(tempfile.gettempdir(), f"fednorms-{pool.token}-{secrets.token_hex(4)}")
        # NCCL needs GPUs, and a different one for each worker.
        backend = "gloo" if "cpu" in self.devices or len(set(self.devices)) < len(self.devices) else "nccl"
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
        ranks = {worker.process.pid: number for number, worker in enumerate(pool.workers)}
        try:
            pool.call_all("join", backend, ranks, path, flags)
        except BaseException:
            pool.close()
            raise
        # Every divergence is reported; the parent decides what to do.
        self._prepare(pool, replace(self.settings, on_divergence="skip"))
        return pool

    @override
    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        if not self._parallel(len(cohort)):
            return self.loop.train(sent, cohort, score=score)
        pool = self.start()
        pool.call_all("load_broadcasts", [sent])
        shares = self._shares(cohort)
        jobs = [("share", names, {n: self.store.get(n) for n in names}, score) for names in shares]
        reports: list[Any] = pool.call_each(jobs)
        for report in reports:
            if isinstance(report, Exception):
                raise report
        diverged = {k: v for report in reports for k, v in report.done.diverged.items()}
        if diverged and self.settings.on_divergence == "stop":
            raise Diverged(next(diverged[name] for name in cohort if name in diverged))
        found = {u.client: u for report in reports for u in report.done.uploads}
        whole = {k: v for report in reports for k, v in report.whole.items()}
        for report in reports:
            for name, state in report.states.items():
                self.store.put(name, state)
        uploads = [found[name] for name in cohort if name in found]
        summed = bool(uploads) and not self.task.method.individual
        return Trained(
            uploads,
            {name: diverged[name] for name in cohort if name in diverged},
            {k: v for report in reports for k, v in report.done.after_local.items()},
            self._combined(pool, uploads, whole) if summed else None,
        )

    def _shares(self, cohort: Sequence[str]) -> list[list[str]]:
        """Divide a cohort: every device gets about the same number of images."""
        shares: list[list[str]] = [[] for _ in self.devices]
        load = [0] * len(shares)
        for name in sorted(cohort, key=lambda name: -self.samples(name)):
            least = load.index(min(load))
            shares[least].append(name)
            load[least] += self.samples(name)
        position = {name: number for number, name in enumerate(cohort)}
        return [sorted(share, key=lambda name: position[name]) for share in shares]

    def _combined(self, pool: Pool, uploads: Sequence[Upload], whole: Mapping[str, Upload]) -> Combined:
        """What the server needs: sums over the devices divided by the weights, and the rest as it was gathered."""
        task, uploads = self.task, sorted(uploads, key=lambda u: u.client)
        how: dict[str, str] = {MODEL: "weighted", EVEN: "uniform", **reductions(task)}
        sized = dict(zip([u.client for u in uploads], upload_weights(task, uploads), strict=True))
        weights = {name: sized if rule == "weighted" else dict.fromkeys(sized, 1.0) for name, rule in how.items()}
        shapes = self._common_shapes(uploads)
        answers = pool.call_each([("add_up", shapes, {name: weights[name] for name in shapes})] * len(self.devices))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        totals = iter(answers[0].split([n for group in shapes.values() for n in _sizes(group)]))
        first, counters = _trees(uploads[0]), _trees(whole[uploads[0].client])
        means: dict[str, Tree] = {}
        for name, group in shapes.items():
            by = 1.0 if how[name] == "sum" else sum(weights[name].values())
            summed = {k: (next(totals) / by).view(first[name][k].shape).to(first[name][k].dtype) for k in group}
            counted = counters[name] * float(len(uploads)) if how[name] == "sum" else counters[name]
            means[name] = Tree({k: summed[k] if k in summed else counted[k] for k in first[name]})
        for name, rule in reductions(task).items():
            if name not in _summed(task):
                rows = [whole[u.client].parts.get(name, Tree()) for u in uploads]
                means[name] = reduce_uploads(rows, list(sized.values()), rule)
        parts = {p.name: means.get(p.name, Tree()) for p in task.method.parts}
        return Combined(means[MODEL], parts, len(uploads), means.get(EVEN, Tree()))

    def _common_shapes(self, uploads: Sequence[Upload]) -> Shapes:
        """Shapes of the floating-point tensors that are summed; all clients must have sent the same."""
        wanted = {MODEL, *_summed(self.task)}
        if any(p.uses_even_mean for p in self.task.method.parts):
            wanted.add(EVEN)
        shapes = [
            {name: _floating(tree) for name, tree in _trees(u).items() if name in wanted and tree} for u in uploads
        ]
        counted = [
            name for name in _summed(self.task) for t in _trees(uploads[0]).get(name, Tree()).values() if is_count(t)
        ]
        if counted:
            raise RunFailed(
                f'"{counted[0]}" sends integer counts, which several devices cannot sum. Send floating-point numbers, '
                'or use engine="graphs" or "loop".'
            )
        for u, own in zip(uploads, shapes, strict=True):
            if own != shapes[0]:
                raise RunFailed(
                    f'Clients "{uploads[0].client}" and "{u.client}" sent updates of different shapes, which several '
                    'devices cannot sum. Use engine="graphs" or "loop".'
                )
        return shapes[0]


def _trees(u: Upload) -> dict[str, Tree]:
    return {MODEL: u.model, EVEN: u.model, **u.parts}


def _summed(task: Task) -> set[str]:
    """Parts whose uploads are only summed; the uploads of the others are gathered."""
    return {name for name, how in reductions(task).items() if how in ("weighted", "uniform", "sum")}


def _shapes(tree: Tree) -> Tree:
    return Tree({k: torch.empty_like(t, device="meta") for k, t in tree.items()})


def _floating(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {k: tuple(t.shape) for k, t in tree.items() if t.is_floating_point()}


def _integers(tree: Tree, wanted: bool) -> Tree:
    return Tree({k: t for k, t in tree.items() if wanted and not t.is_floating_point()})


def _sizes(group: dict[str, tuple[int, ...]]) -> list[int]:
    return [torch.Size(shape).numel() for shape in group.values()]
