"""The cells of a comparison (one method, one seed each), run one after the other or in parallel processes."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fednorms.core.error_origin import place
from fednorms.core.errors import FednormsError, RunFailed
from fednorms.data import Federation
from fednorms.evaluation.scores import Scores
from fednorms.runs.differences import Tested
from fednorms.runs.driver import execute
from fednorms.runs.identity import Custom
from fednorms.runs.recipe import Data, Recipe
from fednorms.runs.result import Result
from fednorms.runs.rounds import RoundEvent
from fednorms.runs.sent_code import packed, unpack
from fednorms.runs.session import open_federation
from fednorms.runs.store.directory import RunDirectory


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: the method as the user wrote it, its recipe (with the seed), and its directory.

    `changed` are keys of the recipe that the stored run has otherwise, such as more rounds.
    """

    label: str
    recipe: Recipe
    path: Path | None = None
    answers: bool = False  # whether the outcome keeps what was predicted, to compare it with others
    changed: Mapping[str, Any] = field(default_factory=dict)


class Averages(NamedTuple):
    """Accuracies of one test: over sites, over all images, and over domains."""

    mean: float
    pooled: float
    domain_mean: float


@dataclass(frozen=True)
class RoundSummary:
    """What an outcome keeps of a round: all scores of all rounds would fill the memory if there are many sites."""

    number: int
    seconds: float
    bytes: float  # up and down, per client
    tests: Mapping[str, Averages]  # by mode and split ("personal/own/test")

    @classmethod
    def of(cls, row: Mapping[str, Any], scores: Mapping[str, Scores]) -> RoundSummary:
        """Summarize a row of metrics and its scores."""
        sent = (row["bytes_up"] + row["bytes_down"]) / max(1, row["clients"])
        tests = {name: Averages(s.mean, s.pooled, s.domain_mean) for name, s in scores.items()}
        return cls(int(row["round"]), float(row["seconds"]), sent, tests)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: its rounds and scores, or why it failed (`details` is a bug's traceback).

    `last` and `at_best` are the scores of the last and of the best-validation round, by mode and split.
    """

    label: str
    seed: int
    lr: float
    headline: str = ""
    rounds: Sequence[RoundSummary] = ()
    last: Mapping[str, Scores] = field(default_factory=dict)
    at_best: Mapping[str, Scores] = field(default_factory=dict)
    error: str = ""
    details: str = ""
    kind: str = ""  # the class of the error: "Diverged", "BadInput", ...
    best: dict[str, Any] | None = None  # round and score of the best validation
    answers: Mapping[str, Tested] = field(default_factory=dict)  # of the last round, by mode ("personal/own")

    @classmethod
    def of(cls, label: str, result: Result) -> Outcome:
        """The outcome of a finished run."""
        recipe, best = result.recipe, result.best
        rounds = [RoundSummary.of(row, Scores.in_row(row, result.domain_of)) for row in result.history]
        last, at_best = result.tested(result.rounds), result.tested(best["round"]) if best else {}
        return cls(label, recipe.seed, recipe.training.lr, result.headline, rounds, last, at_best, best=best)

    @property
    def status(self) -> Literal["done", "diverged", "failed"]:
        """Whether the cell has a result: divergence counts as one, an error does not."""
        return "done" if not self.error else "diverged" if self.kind == "Diverged" else "failed"

    @property
    def scores(self) -> dict[str, Scores]:
        """Test scores of the last round, by mode ("personal/own")."""
        return {s.label: s for s in self.last.values() if s.split == "test"}


@dataclass(frozen=True)
class CellEvent:
    """A round of a cell is done, or (with `outcome`) the cell."""

    label: str
    seed: int
    round: int
    rounds: int
    row: dict[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Scores] = field(default_factory=dict)
    outcome: Outcome | None = None
    metric: str = "accuracy"


Watch = Callable[[CellEvent], None]


def run_cell(cell: Cell, custom: Custom, watch: Watch) -> Outcome:
    """Run or continue one cell; a failure is an outcome too, so the other cells continue."""
    recipe, before = cell.recipe, torch.get_num_threads()

    def after_round(event: RoundEvent) -> None:
        metric = event.recipe.metric
        watch(CellEvent(cell.label, recipe.seed, event.round, event.rounds, event.row, event.scores, metric=metric))

    torch.set_num_threads(recipe.threads or before)
    try:
        data = custom.federation if custom.federation is not None else opened(recipe)
        result = execute(
            recipe,
            out=cell.path,
            federation=data,
            model=custom.model,
            loss=custom.loss,
            own=custom.training,
            callback=after_round,
            changed=cell.changed,
        )
        outcome = Outcome.of(cell.label, result)
        return replace(outcome, answers=result.answers()) if cell.answers else outcome
    except FednormsError as error:
        kind = type(error).__name__
        return Outcome(cell.label, recipe.seed, recipe.training.lr, error=str(error), kind=kind)
    except Exception as error:
        kind, where = type(error).__name__, traceback.format_exc()
        reason = f"{kind}: {error}" + (f", in {arose}" if (arose := place(error)) else "")
        return Outcome(cell.label, recipe.seed, recipe.training.lr, error=reason, details=where, kind=kind)
    finally:
        torch.set_num_threads(before)


def opened(recipe: Recipe) -> Federation:
    """The federation of a recipe; the latest one is cached, because runs on the same data follow each other."""
    return _opened(recipe.federation, recipe.data.model_dump_json())


@lru_cache(maxsize=1)
def _opened(name: str, data: str) -> Federation:
    return open_federation(Recipe(federation=name, data=Data.model_validate_json(data)))


def run_cells(
    cells: Sequence[Cell],
    jobs: int = 1,
    custom: Custom = Custom(),  # noqa: B008  it is frozen
    watch: Watch = lambda event: None,
    starts: Callable[[Cell], bool] = lambda cell: True,
) -> list[Outcome]:
    """Run the cells, `jobs` at a time, except those for which `starts` is false; outcomes are in their order."""
    here = [i for i, cell in enumerate(cells) if jobs == 1 or _finished(cell)]  # finished ones only need to be read
    outcomes: dict[int, Outcome] = {}
    for i in here:
        if starts(cells[i]):
            outcomes[i] = run_cell(cells[i], custom, watch)
            watch(_done(cells[i], outcomes[i]))
    rest = [i for i in range(len(cells)) if i not in here]
    if rest:
        methods = dict.fromkeys(cells[i].recipe.method for i in rest)
        done = _Pool(min(jobs, len(rest)), custom, methods, watch, starts).run([cells[i] for i in rest])
        outcomes.update({rest[place]: outcome for place, outcome in done.items()})
    return [outcomes[i] for i in sorted(outcomes)]


def _finished(cell: Cell) -> bool:
    if cell.path is None or cell.changed:
        return False
    try:
        return RunDirectory(cell.path).summary() is not None
    except RunFailed:  # unreadable: the run writes it again
        return False


def _done(cell: Cell, outcome: Outcome) -> CellEvent:
    rounds = cell.recipe.rounds
    reached = outcome.rounds[-1].number if outcome.rounds else 0
    return CellEvent(cell.label, cell.recipe.seed, reached, rounds, outcome=outcome)


@dataclass
class _Worker:
    process: BaseProcess
    line: Connection
    cell: int | None = None  # the index of its current cell
    ready: bool = False


class _Pool:
    """Worker processes that each take the next cell; if one dies, only its cell is lost."""

    def __init__(
        self, jobs: int, custom: Custom, methods: Iterable[str], watch: Watch, starts: Callable[[Cell], bool]
    ) -> None:
        self.jobs, self.federation, self.watch, self.starts = jobs, custom.federation, watch, starts
        self.code = packed(custom, methods)
        self.context = get_context("spawn")  # a fork would inherit torch's threads in an unusable state
        self.workers: list[_Worker] = []

    def run(self, cells: Sequence[Cell]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        todo = list(reversed(range(len(cells))))
        try:
            while True:
                while len(self.workers) < self.jobs and (index := self._take(todo, cells)) is not None:
                    self._start(index, cells)
                if not self.workers:
                    return outcomes
                for line in wait([w.line for w in self.workers]):
                    worker = next(w for w in self.workers if w.line is line)
                    event = self._receive(worker, cells)
                    if event is None:
                        continue
                    self.watch(event)
                    if event.outcome is not None:
                        assert worker.cell is not None
                        outcomes[worker.cell] = event.outcome
                        self._next(worker, todo, cells)
        finally:
            for worker in self.workers:
                worker.process.kill()
            for worker in self.workers:
                worker.process.join()

    def _take(self, todo: list[int], cells: Sequence[Cell]) -> int | None:
        """The next cell that may start, if there is one."""
        while todo:
            if self.starts(cells[index := todo.pop()]):
                return index
        return None

    def _start(self, index: int, cells: Sequence[Cell]) -> None:
        here, there = self.context.Pipe()
        process = self.context.Process(target=_work, args=(there, self.federation, self.code), daemon=True)
        process.start()
        there.close()
        self.workers.append(_Worker(process, here, index))
        with suppress(BrokenPipeError):  # it died at once: `_receive` notices
            here.send(cells[index])

    def _next(self, worker: _Worker, todo: list[int], cells: Sequence[Cell]) -> None:
        index = self._take(todo, cells) if worker.process.is_alive() else None
        if index is None:
            self.workers.remove(worker)
            worker.process.kill()
            worker.process.join()
            return
        worker.cell = index
        with suppress(BrokenPipeError):
            worker.line.send(cells[index])

    def _receive(self, worker: _Worker, cells: Sequence[Cell]) -> CellEvent | None:
        try:
            said = worker.line.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            code = worker.process.exitcode
            if not worker.ready:
                raise RunFailed(
                    f"A worker process could not start (exit code {code}). In a script, call compare below "
                    '`if __name__ == "__main__":`, or use jobs=1.'
                ) from None
            assert worker.cell is not None
            cell = cells[worker.cell]
            why = f"its process died (exit code {code}; -9 is often a lack of memory)"
            return _done(cell, Outcome(cell.label, cell.recipe.seed, cell.recipe.training.lr, error=why))
        worker.ready = True
        return said


def _work(line: Connection, federation: Federation | None, code: bytes) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # often sent to all processes: the parent handles it and ends them
        signal.signal(number, signal.SIG_IGN)
    custom = replace(unpack(code), federation=federation)
    line.send(None)
    with suppress(EOFError, BrokenPipeError):
        while True:
            cell: Cell = line.recv()
            line.send(_done(cell, run_cell(cell, custom, line.send)))
