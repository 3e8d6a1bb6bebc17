"""Worker processes: clients run side by side on the cores of a machine, with the loop's results bit for bit.

Every worker has its own copy of the task and its own loop, which it runs on cohorts of one. The federation and the
broadcast are in memory that all workers map. Free workers take the next client, the largest first. Client states stay
with the parent.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.part import Part, Pass
from fednorms.core.states import Broadcast, ClientState, Task
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.base import DEFAULTS, EngineSettings, Trained
from fednorms.engines.local import LocalEngine
from fednorms.engines.loop import Loop
from fednorms.engines.states import ClientStates, InMemory
from fednorms.engines.workers.pool import Pool, cores
from fednorms.engines.workers.transport import Sender, check_picklable
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore

States = dict[str, ClientState]


class Worker:
    """What a worker process holds: the federation as views of shared memory, and an engine with its own task."""

    def __init__(self, device: str) -> None:
        self.device = device

    def load_data(self, training: Federation, testing: Federation) -> None:
        """Receive the federation."""
        self.training, self.testing = training, testing

    def load_task(self, task: Task, settings: EngineSettings, dtype: torch.dtype) -> None:
        """Receive the task."""
        torch.set_default_dtype(dtype)
        torch.set_num_threads(settings.threads)
        self.engine = self._engine(task, settings)

    def _engine(self, task: Task, settings: EngineSettings) -> LocalEngine:
        return Loop(task, self.training, self.testing, InMemory(), settings)

    def load_broadcasts(self, broadcasts: list[Broadcast]) -> None:
        """Receive what the server sends; later calls refer to a broadcast by its number."""
        self.broadcasts = broadcasts

    def train(self, number: int, name: str, state: ClientState | None, score: bool) -> tuple[Trained, States]:
        """Train one client; returns the result and the client's new state."""
        self._load_states({name: state})
        done = self.engine.train(self.broadcasts[number], [name], score=score)
        return done, dict(self.engine.store.changed)

    def measure(self, number: int, name: str, state: ClientState | None, part: str, which: int) -> tuple[Tree, Tree]:
        """Run an extra pass at one client."""
        self._load_states({name: state})
        p = next(p for p in self.engine.task.method.parts if p.name == part)
        return self.engine.measure(p, p.passes()[which], self.broadcasts[number], [name])[name]

    def score(self, number: int, name: str, state: ClientState | None, split: str, mode: Mode) -> SiteScore:
        """Test a mode at one site."""
        self._load_states({name: state})
        return self.engine.score_site(name, self.broadcasts[number], split, mode)

    def _load_states(self, states: Mapping[str, ClientState | None]) -> None:
        self.engine.use(InMemory({name: state for name, state in states.items() if state is not None}))


class Workers(LocalEngine):
    """Runs clients in worker processes.

    The results are those of the loop with as many threads, bit for bit. The processes start with the first cohort of
    more than one client and end with `close`, or with the engine. A single client runs in this process.
    """

    name: ClassVar[str] = "workers"

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        settings: EngineSettings = DEFAULTS,
    ) -> None:
        super().__init__(task, training, testing, store, settings)
        _check_picklable(task)
        self.loop = Loop(task, training, testing, store, settings)
        self.local = self.loop.local
        self.federations = training, testing
        self.count = settings.workers or cores()
        self.pool: Pool | None = None
        if self.count > 1 and multiprocessing.current_process().daemon:
            self.count = 1
            self.notes.append("clients ran one after the other: a worker process cannot start workers itself")

    def _parallel(self, jobs: int) -> bool:
        """Whether this number of jobs goes to worker processes."""
        return self.count > 1 and jobs > 1  # after `close`, the count is 0

    # -- what clients do ----------------------------------------------------------------------------------------
    @override
    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        if not self._parallel(len(cohort)):
            return self.loop.train(sent, cohort, score=score)
        done = Trained([])
        for trained, states in self._all("train", dict.fromkeys(cohort, sent), self._images(cohort), score):
            done.uploads += trained.uploads
            done.diverged |= trained.diverged
            done.after_local |= trained.after_local
            for name, state in states.items():
                self.store.put(name, state)
        return done

    @override
    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        same = [i for i, other in enumerate(p.passes()) if other.when == job.when]
        if len(same) != 1 or not self._parallel(len(names)):  # workers are told the number of a pass
            return self.loop.measure(p, job, sent, names)
        found = self._all("measure", dict.fromkeys(names, sent), self._images(names), p.name, same[0])
        return dict(zip(names, found, strict=True))

    @override
    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        if not self._parallel(len(jobs)):
            return self.loop.score_sites(jobs, split, mode)
        sizes = {name: len(self.local.tested_sites[name].splits[split]) for name in jobs}
        return dict(zip(jobs, self._all("score", jobs, sizes, split, mode), strict=True))

    def _all(self, what: str, jobs: Mapping[str, Broadcast], sizes: dict[str, int], *args: object) -> Iterator[Any]:
        """Call a worker's method for sites, the largest first; yields the answers in the order of `jobs`.

        If sites fail, the answers before the first of them come, then its exception: as in the loop.
        """
        broadcasts = {id(sent): sent for sent in jobs.values()}
        number = {key: i for i, key in enumerate(broadcasts)}
        position = {name: i for i, name in enumerate(jobs)}
        pool = self.start()
        pool.call_all("load_broadcasts", list(broadcasts.values()))
        answers: dict[str, Any] = {}
        end = len(jobs)  # sites after the first that fails need not run
        todo = deque(sorted(jobs, key=lambda name: -sizes[name]))
        calls = pool.map_unordered(todo, lambda n: (what, number[id(jobs[n])], n, self.store.get(n), *args))
        for name, answer in calls:
            answers[name] = answer
            if isinstance(answer, Exception):
                end = min(end, position[name])
                for later in [n for n in todo if position[n] > end]:
                    todo.remove(later)
        for name in jobs:
            if isinstance(answers[name], Exception):
                raise answers[name]
            yield answers.pop(name)

    # -- the processes ------------------------------------------------------------------------------------------
    def start(self) -> Pool:
        """Start the worker processes, unless they are running; an interrupted pool is replaced."""
        if self.pool is not None and self.pool.interrupted:
            self.pool.close()
            self.pool = None
        if self.pool is None:
            self.pool = pool = self._new_pool()
            weakref.finalize(self, pool.close)
        return self.pool

    def _new_pool(self) -> Pool:
        pool = Pool(Worker, ["cpu"] * min(self.count, len(self.local.sites)))
        self._prepare(pool, self.settings)
        return pool

    def _prepare(self, pool: Pool, settings: EngineSettings) -> None:
        """Send the federation and the task to all workers."""
        try:
            pool.call_all("load_data", *self.federations, sender=Sender(pool.token, one_reader=False))
            pool.call_all("load_task", self.task, settings, torch.get_default_dtype(), copy=True)
        except (AttributeError, ImportError) as error:
            pool.close()
            raise BadInput(
                f"A worker process cannot import something that this run uses: {error}. Define models, losses and "
                'parts in an importable module (not in a notebook or at a prompt), or use engine="loop".'
            ) from None
        except BaseException:
            pool.close()
            raise

    @override
    def close(self) -> None:
        self.count = 0
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def _check_picklable(task: Task) -> None:
    for what, thing in (("loss", task.loss), ("model", task.net), ("task", task)):
        try:
            check_picklable(thing)
        except Exception as error:  # pickle raises many types
            raise BadInput(
                f"The {what} cannot be sent to worker processes: {error}. Define functions and classes at the top of a "
                'module, without lambdas, or use engine="loop".'
            ) from None
