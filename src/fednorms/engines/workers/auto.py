"""The automatic choice between the loop and worker processes, by measurement: both give the same bits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from typing_extensions import override

from fednorms.core.errors import FednormsError
from fednorms.core.part import Part, Pass
from fednorms.core.states import Broadcast, Task
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.base import DEFAULTS, EngineSettings, Trained
from fednorms.engines.local import LocalEngine
from fednorms.engines.loop import Loop
from fednorms.engines.states import ClientStates
from fednorms.engines.workers.engine import Workers
from fednorms.engines.workers.unguarded import unguarded_script
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore

LOOPED = 2  # rounds for which the loop is timed; the faster one counts
TRIED = 2  # rounds in which workers have to beat it
WORTH_STARTING = 15.0  # seconds that workers must promise to save in the rest of the run, since starting takes some


class Auto(LocalEngine):
    """Starts in the loop; switches to worker processes if they promise to save time, and back if they do not.

    Workers are started when the remaining rounds, at the loop's speed and divided by their number, would save more than
    15 seconds. Two rounds later the faster of the two, in seconds per training image, runs the rest. So a short run or
    one with a single client never starts a process, nor does a script that a new process would run again.
    """

    name: ClassVar[str] = "auto"

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        settings: EngineSettings = DEFAULTS,
    ) -> None:
        super().__init__(task, training, testing, store, settings)
        self.workers = Workers(task, training, testing, store, settings)
        self.loop, self.local, self.notes = self.workers.loop, self.workers.local, self.workers.notes
        self.chosen: Literal["loop", "workers"] = "loop"
        self.settled = False
        self.times: dict[str, list[float]] = {"loop": [], "workers": []}  # seconds per training image
        self.worth_starting = WORTH_STARTING

    @property
    def engine(self) -> LocalEngine:
        """The engine that runs the next round."""
        return self.workers if self.chosen == "workers" else self.loop

    @override
    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        return self.engine.measure(p, job, sent, names)

    @override
    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        return self.engine.score_sites(jobs, split, mode)

    @override
    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        started = time.perf_counter()
        done = self.engine.train(sent, cohort, score=score)
        if cohort and not self.settled:
            seconds = time.perf_counter() - started
            self.times[self.chosen].append(seconds / sum(self.samples(name) for name in cohort))
            self._choose(seconds, len(cohort), self.task.rounds - sent.round - 1)
        return done

    @override
    def close(self) -> None:
        self.chosen, self.settled = "loop", True
        self.workers.close()

    def _choose(self, seconds: float, clients: int, rounds_left: int) -> None:
        """Decide where the next round runs, from the seconds that the last one took."""
        looped, tried = self.times["loop"], self.times["workers"]
        if self.chosen == "loop":
            saving = rounds_left * seconds * (1 - 1 / min(self.workers.count, clients))
            if len(looped) < LOOPED or saving <= self.worth_starting:
                return
            if script := unguarded_script():
                self._stay_with_loop(
                    f'{Path(script).name} has no `if __name__ == "__main__":`, and worker processes would run it again'
                )
            else:
                self.chosen = "workers"
                try:
                    self.workers.start()
                except FednormsError as error:  # for example a model that was defined at a prompt
                    self._stay_with_loop(str(error))
        elif len(tried) >= TRIED:
            if min(tried) < min(looped):
                self.settled = True
            else:
                self._stay_with_loop("worker processes were slower")

    def _stay_with_loop(self, why: str) -> None:
        self.notes.append(f"clients ran one after the other: {why}")
        self.close()


def loop_or_workers(
    task: Task, training: Federation, testing: Federation, store: ClientStates, settings: EngineSettings
) -> LocalEngine:
    """The engine that chooses; the loop where worker processes cannot run the method, the model or the loss."""
    try:
        return Auto(task, training, testing, store, settings)
    except FednormsError:
        return Loop(task, training, testing, store, settings)
