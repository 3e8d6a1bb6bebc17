"""The choice between the loop and worker processes, by measurement: both give the same bits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from typing_extensions import override

from fednorms.core.errors import FednormsError
from fednorms.core.states import Broadcast, Task
from fednorms.data import Federation
from fednorms.engines.loop import Loop, Trained
from fednorms.engines.states import ClientStates
from fednorms.engines.workers.engine import Workers
from fednorms.engines.workers.unguarded import unguarded_script

LOOPED = 2  # rounds that the loop is timed for; the faster counts
TRIED = 2  # rounds in which workers have to beat it
WORTH_STARTING = 15.0  # seconds that workers must promise to save in the rest of the run: starting them takes some


class Measured(Workers):
    """Starts as the loop; goes over to worker processes if they promise to save time, and back if they do not.

    Workers are started when the rounds to come, at the loop's speed and divided by their number, would save more than
    15 seconds. Two rounds later the faster of the two, in seconds per training image, runs the rest. A short run or
    one with a single client so never starts a process, nor does a script that a new process would run once more.
    """

    name: ClassVar[str] = "auto"

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        threads: int = 1,
        on_divergence: Literal["stop", "skip"] = "stop",
        workers: int = 0,
        worth_starting: float = WORTH_STARTING,
    ) -> None:
        self.using: Literal["loop", "workers"] = "loop"
        self.settled = False
        self.times: dict[str, list[float]] = {"loop": [], "workers": []}  # seconds per training image
        self.worth_starting = worth_starting
        super().__init__(task, training, testing, store, threads, on_divergence, workers)

    @override
    def _spread(self, jobs: int) -> bool:
        return self.using == "workers" and super()._spread(jobs)

    @override
    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        if self.settled or not cohort:
            return super().train(sent, cohort, score=score)
        started = time.perf_counter()
        done = super().train(sent, cohort, score=score)
        seconds = time.perf_counter() - started
        self.times[self.using].append(seconds / sum(len(self.data[name]) for name in cohort))
        self._choose(seconds, len(cohort), self.task.rounds - sent.round - 1)
        return done

    def _choose(self, seconds: float, clients: int, rounds_left: int) -> None:
        """Decide where the next round runs, after one that took so long."""
        looped, tried = self.times["loop"], self.times["workers"]
        if self.using == "loop":
            saving = rounds_left * seconds * (1 - 1 / min(self.count, clients))
            if len(looped) < LOOPED or saving <= self.worth_starting:
                return
            if script := unguarded_script():
                self._stay(
                    f'clients ran one after the other: {Path(script).name} has no `if __name__ == "__main__":`, and '
                    "worker processes would run it once more"
                )
            else:
                self.using = "workers"
                try:
                    self._open()
                except FednormsError as error:  # a script without a main guard, a model made at a prompt
                    self._stay(f"clients ran one after the other: {error}")
        elif len(tried) >= TRIED:
            if min(tried) < min(looped):
                self.settled = True
            else:
                self._stay("clients ran one after the other: worker processes were slower")

    def _stay(self, why: str) -> None:
        self.using, self.settled = "loop", True
        self.notes.append(why)
        self.close()


def loop_or_workers(
    task: Task,
    training: Federation,
    testing: Federation,
    store: ClientStates,
    threads: int,
    on_divergence: Literal["stop", "skip"],
    workers: int,
) -> Loop:
    """The engine that chooses; the loop itself where workers cannot run the method, the model or the loss."""
    try:
        return Measured(task, training, testing, store, threads, on_divergence, workers)
    except FednormsError:
        return Loop(task, training, testing, store, threads, on_divergence)
