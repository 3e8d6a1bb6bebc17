"""Worker processes: clients run side by side on the cores of a machine, with the loop's results bit for bit.

Every worker holds the task and a loop of its own, which it runs on cohorts of one; the federation and the broadcast lie
in memory that all of them map. Clients are handed out as workers get free, the largest first. Client states stay with
the parent.
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
from fednorms.engines.workers.transport import Outbox, check
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore


class Desk:
    """What a worker process holds: the federation as views of shared memory, its own task, and a loop to run it."""

    def __init__(self, device: str) -> None:
        self.device = device

    def hold(self, training: Federation, testing: Federation) -> None:
        """Take the federation."""
        self.training, self.testing = training, testing

    def begin(self, task: Task, settings: EngineSettings, dtype: torch.dtype) -> None:
        """Take the task."""
        torch.set_default_dtype(dtype)
        torch.set_num_threads(settings.threads)
        self.engine = self._engine(task, settings)

    def _engine(self, task: Task, settings: EngineSettings) -> LocalEngine:
        return Loop(task, self.training, self.testing, InMemory(), settings)

    def post(self, broadcasts: list[Broadcast]) -> None:
        """Take what the server sends; later messages name a broadcast by its number."""
        self.broadcasts = broadcasts

    def train(self, number: int, name: str, state: ClientState | None, score: bool) -> tuple[Trained, Kept]:
        """Train one client."""
        self._remember({name: state})
        done = self.engine.train(self.broadcasts[number], [name], score=score)
        return done, dict(self.engine.store.changed)

    def measure(self, number: int, name: str, state: ClientState | None, part: str, which: int) -> tuple[Tree, Tree]:
        """Run an extra pass at one client."""
        self._remember({name: state})
        p = next(p for p in self.engine.task.method.parts if p.name == part)
        return self.engine.measure(p, p.passes()[which], self.broadcasts[number], [name])[name]

    def score(self, number: int, name: str, state: ClientState | None, split: str, mode: Mode) -> SiteScore:
        """Test a mode at one site."""
        self._remember({name: state})
        return self.engine.score_sites({name: self.broadcasts[number]}, split, mode)[name]

    def _remember(self, states: dict[str, ClientState | None]) -> None:
        self.engine.use(InMemory({name: state for name, state in states.items() if state is not None}))


Kept = dict[str, ClientState]


class Workers(LocalEngine):
    """Runs clients in worker processes; cohorts that are not spread run in a loop in this process.

    The results are those of the loop with as many threads, bit for bit. The processes start with the first cohort of
    more than one client and end with `close`, or with the engine.
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
        super().__init__(task, settings)
        _refuse_what_cannot_travel(task)
        self.loop = Loop(task, training, testing, store, settings)
        self.local = self.loop.local
        self.federations = training, testing
        self.count = settings.workers or cores()
        self.pool: Pool | None = None
        if self.count > 1 and multiprocessing.current_process().daemon:
            self.count = 1
            self.notes.append("clients ran one after the other: a worker process cannot start workers of its own")

    def _spread(self, jobs: int) -> bool:
        """Whether so many jobs go to worker processes."""
        return self.count > 1 and jobs > 1  # `close` leaves none

    # -- the three things that clients do -----------------------------------------------------------------------
    @override
    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        if not self._spread(len(cohort)):
            return self.loop.train(sent, cohort, score=score)
        done = Trained([])
        for trained, kept in self._all("train", dict.fromkeys(cohort, sent), self._sizes("train"), score):
            done.uploads += trained.uploads
            done.diverged |= trained.diverged
            done.after_local |= trained.after_local
            for name, state in kept.items():
                self.store.put(name, state)
        return done

    @override
    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        same = [i for i, other in enumerate(p.passes()) if other.when == job.when]
        if len(same) != 1 or not self._spread(len(names)):  # a pass travels as its number
            return self.loop.measure(p, job, sent, names)
        found = self._all("measure", dict.fromkeys(names, sent), self._sizes("train"), p.name, same[0])
        return dict(zip(names, found, strict=True))

    @override
    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        if not self._spread(len(jobs)):
            return self.loop.score_sites(jobs, split, mode)
        return dict(zip(jobs, self._all("score", jobs, self._sizes(split), split, mode), strict=True))

    def _sizes(self, split: str) -> dict[str, int]:
        sites = (*self.local.sites.values(), *self.local.testing.sites)
        return {s.name: len(data) for s in sites if (data := s.splits.get(split)) is not None}

    def _all(self, what: str, jobs: Mapping[str, Broadcast], sizes: dict[str, int], *args: object) -> Iterator[Any]:
        """Do something at sites, the largest first; yields the answers in the order of `jobs`, as the loop would.

        If sites fail, the answers before the first of them come, then its exception.
        """
        broadcasts = {id(sent): sent for sent in jobs.values()}
        number = {key: i for i, key in enumerate(broadcasts)}
        place = {name: i for i, name in enumerate(jobs)}
        pool = self.start()
        pool.tell("post", list(broadcasts.values()))
        answers: dict[str, Any] = {}
        end = len(jobs)  # sites after the first that fails need not run
        todo = deque(sorted(jobs, key=lambda name: -sizes[name]))
        for name, answer in pool.share(todo, lambda n: (what, number[id(jobs[n])], n, self.store.get(n), *args)):
            answers[name] = answer
            if isinstance(answer, Exception):
                end = min(end, place[name])
                for later in [n for n in todo if place[n] > end]:
                    todo.remove(later)
        for name in jobs:
            if isinstance(answers[name], Exception):
                raise answers[name]
            yield answers.pop(name)

    # -- the processes ------------------------------------------------------------------------------------------
    def start(self) -> Pool:
        """The worker processes, started or restarted if need be."""
        if self.pool is not None and self.pool.interrupted:
            self.pool.close()
            self.pool = None
        if self.pool is None:
            self.pool = pool = self._start()
            weakref.finalize(self, pool.close)
        return self.pool

    def _start(self) -> Pool:
        pool = Pool(Desk, ["cpu"] * min(self.count, len(self.local.sites)))
        self._prepare(pool, self.settings)
        return pool

    def _prepare(self, pool: Pool, settings: EngineSettings) -> None:
        try:
            pool.tell("hold", *self.federations, board=Outbox(pool.token, sole=False))
            pool.tell("begin", self.task, settings, torch.get_default_dtype(), copy=True)
        except (AttributeError, ImportError) as error:
            pool.close()
            raise BadInput(
                f"A worker process cannot find something that this run uses: {error}. Define models, losses and parts "
                'in a module that can be imported (not in a notebook or at a prompt), or use engine="loop".'
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


def _refuse_what_cannot_travel(task: Task) -> None:
    for what, thing in (("loss", task.loss), ("model", task.net), ("task", task)):
        try:
            check(thing)
        except Exception as error:  # pickle raises what it likes
            raise BadInput(
                f"The {what} cannot be sent to worker processes: {error}. Define functions and classes at the top of a "
                'module, without lambdas, or use engine="loop".'
            ) from None
