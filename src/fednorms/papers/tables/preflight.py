"""Before the first run of a table: which rows can never run, which cells stay empty, and how long it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from fednorms.core.errors import BadInput, FednormsError
from fednorms.data import Federation
from fednorms.papers.tables.plan import Job
from fednorms.runs.cells import opened
from fednorms.runs.driver import execute
from fednorms.runs.recipe import Recipe
from fednorms.runs.rounds import RoundEvent
from fednorms.runs.session import Session

_LONG = 20.0  # seconds of a round after which one is enough; of longer ones, a few steps
_STEPS = (1, 4)  # of a client in short rounds
_PATIENCE = 60.0  # seconds for all timing
_ROUNDS = "a few timed rounds"


@dataclass(frozen=True)
class Estimate:
    """Seconds until all runs are done (None: unknown), and what the estimate is based on, or why there is none."""

    seconds: float | None
    basis: str


def recorded(job: Job, records: Sequence[Mapping[str, Any]], hardware: str) -> tuple[float, str] | None:
    """Seconds that similar runs took: of the same row and on the same hardware, if there are any."""
    setting = [r for r in records if r["setting"] == job.setting.name and r["status"] == "done"]
    for here in (True, False):
        of = [r for r in setting if (r["hardware"] == hardware) == here]
        if like := [r for r in of if r["row"] == job.row.name] or of:
            basis = "finished runs" if here else f"runs on other hardware ({like[0]['hardware']})"
            return fmean(r["seconds"]["total"] for r in like), basis
    return None


def seconds_of(
    jobs: Sequence[Job], records: Sequence[Mapping[str, Any]], hardware: str, *, measure: bool
) -> list[tuple[float | None, str]]:
    """How long each run takes, and how or why not that is known; `measure` allows a minute to time one per setting."""
    began, found = time.monotonic(), []
    timed: dict[str, tuple[float | None, str]] = {}
    for job in jobs:
        known, name = recorded(job, records, hardware), job.setting.name
        if known is None and name not in timed:
            if measure and time.monotonic() - began < _PATIENCE:
                timed[name] = _timed(job)
            else:  # assume as long as the others
                others = [seconds for seconds, _ in timed.values() if seconds is not None]
                timed[name] = (fmean(others), _ROUNDS) if others else (None, "no similar run has finished.")
        found.append(known or timed[name])
    return found


def estimate(
    jobs: Sequence[Job], records: Sequence[Mapping[str, Any]], hardware: str, parallel: int, *, measure: bool
) -> Estimate:
    """Estimate the time of these runs, `parallel` at a time; see `seconds_of`."""
    found = seconds_of(jobs, records, hardware, measure=measure)
    times = [seconds for seconds, _ in found if seconds is not None]
    if len(times) < len(found):
        return Estimate(None, next(why for seconds, why in found if seconds is None))
    cores = parallel if jobs and jobs[0].recipe.device != "cpu" else min(parallel, os.cpu_count() or 1)
    basis = " and ".join(dict.fromkeys(basis for _, basis in found))
    return Estimate(sum(times) / max(1, min(cores, len(jobs))), basis)


class _Enough(Exception):
    pass


def _timed(job: Job) -> tuple[float | None, str]:
    try:
        return measured(job.recipe), _ROUNDS
    except FednormsError as error:
        return None, f"a trial run failed ({job.label}). {error}"


def measured(recipe: Recipe) -> float:
    """Seconds that a run will take, from a few rounds with and without a test, or of a few steps if they are long.

    These rounds are tested like the run itself, so timing a search uses validation images only.
    """
    began = time.perf_counter()
    federation = opened(recipe)
    opening = time.perf_counter() - began
    plain, test = _from_steps(recipe, federation)
    if plain <= _LONG:
        return opening + _from_rounds(recipe, federation)
    return opening + plain * recipe.rounds + test * _tests(recipe, federation)


def _from_steps(recipe: Recipe, federation: Federation) -> tuple[float, float]:
    """Seconds of a round and of a test, as far as a few steps tell; 0 if rounds are short or cannot be shortened."""
    batch, given = recipe.training.batch_size, recipe.training
    sizes = [len(site.train) for site in federation.clients if site.train is not None]
    steps = given.steps or given.epochs * fmean(-(-size // batch) for size in sizes)
    if steps <= max(_STEPS):
        return 0.0, 0.0
    found = []
    for count in _STEPS:
        training = replace(given, steps=count, client_epochs=None)
        try:
            second, clients = _second_round(recipe.model_copy(update={"training": training}), federation)
        except BadInput:  # a part wants whole epochs
            return 0.0, 0.0
        if second * steps <= _LONG:  # at most
            return 0.0, 0.0
        found.append(second)
    step = max(0.0, found[1] - found[0]) / (_STEPS[1] - _STEPS[0])  # of all clients
    images = sum(len(site.splits["test"]) for site in federation.sites if "test" in site.splits)
    return found[0] + step * (steps - _STEPS[0]), step / clients * images / batch / 3  # a test has no backward pass


def _second_round(recipe: Recipe, federation: Federation) -> tuple[float, int]:
    """Seconds and clients of a round without a test; the first round is slower."""
    rows: list[Mapping[str, Any]] = []

    def after_round(event: RoundEvent) -> None:
        rows.append(event.row)
        if len(rows) == 2:
            raise _Enough

    try:
        short = {"rounds": 3, "evaluate_every": 3, "validate_every": None}
        execute(recipe.model_copy(update=short), federation=federation, callback=after_round)
    except _Enough:
        pass
    return float(rows[-1]["seconds"]), int(rows[-1]["clients"])


def _from_rounds(recipe: Recipe, federation: Federation) -> float:
    """Seconds of a run as far as its first rounds tell; a long one ends them."""
    short = recipe.model_copy(update={"rounds": min(3, recipe.rounds), "evaluate_every": 3, "validate_every": None})
    seconds: list[float] = []
    began = time.perf_counter()

    def after_round(event: RoundEvent) -> None:
        seconds.append(float(event.row["seconds"]))
        if seconds[-1] > _LONG:
            raise _Enough

    try:
        execute(short, federation=federation, callback=after_round)
    except _Enough:
        pass
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    opening = time.perf_counter() - began - sum(seconds)
    plain = seconds[min(1, len(seconds) - 1)]
    test = max(0.0, seconds[-1] - plain)
    return opening + seconds[0] + plain * (recipe.rounds - 1) + test * _tests(recipe, federation)


def _tests(recipe: Recipe, federation: Federation) -> float:
    """How often a run is tested; validation by itself costs its share of a test."""
    tests = recipe.rounds / recipe.evaluate_every
    return tests + (
        recipe.rounds / recipe.validate_every * _share_of_validation(federation) if recipe.validate_every else 0
    )


def _share_of_validation(federation: Federation) -> float:
    counts = [sum(len(s.splits[part]) for s in federation.sites if part in s.splits) for part in ("val", "test")]
    return counts[0] / max(1, sum(counts))


@dataclass
class Checked:
    """What is wrong with the runs that are planned."""

    problems: dict[str, list[str]] = field(default_factory=dict)  # message, and the rows that it concerns
    untested: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)  # setting, column, mode: rows

    def refuse(self, name: str, columns: Sequence[str]) -> None:
        """Raise one error with all problems, including those of `columns`; nothing has been written yet."""
        lines = [*columns, *(f"{', '.join(rows)}: {what}" for what, rows in self.problems.items())]
        if not lines:
            return
        listed = "\n".join(f"  - {line}" for line in lines)
        raise BadInput(
            f"{name}: nothing was started, because some runs cannot work:\n{listed}\n"
            "Fix the table, or restrict the run with only= and settings= (--only, --settings)."
        )

    @property
    def notes(self) -> list[str]:
        """Which cells will stay empty, and why."""
        return [
            f'{setting}, column "{column}": no number for {", ".join(rows)}, which is not tested as "{mode}"'
            for (setting, column, mode), rows in self.untested.items()
        ]


def checked(jobs: Iterable[Job]) -> Checked:
    """Open every run and close it again; runs that differ only in seed and learning rate are opened once."""
    found, seen = Checked(), set()
    for job in jobs:
        key = (job.label, _essence(job.recipe))
        if key in seen:
            continue
        seen.add(key)
        try:
            session = Session.open(_light(job.recipe), opened(job.recipe))
        except BadInput as error:
            rows = found.problems.setdefault(str(error), [])
            rows += [job.label] if job.label not in rows else []
        except Exception:  # an error in custom code: the run itself reports it, and the others continue
            continue
        else:
            _note_untested(found, job, session)
    return found


def _note_untested(found: Checked, job: Job, session: Session) -> None:
    modes, headline = [str(mode) for mode in session.modes], str(session.headline)
    for column, selector in job.setting.selectors.items():
        if selector.of_a_test and not selector.mode_among(modes, headline):
            rows = found.untested.setdefault((job.setting.name, column, selector.mode or headline), [])
            rows += [job.row.name] if job.row.name not in rows else []


def _light(recipe: Recipe) -> Recipe:
    """The same recipe on the CPU in one process; what can be opened there can be opened anywhere."""
    return recipe.model_copy(update={"engine": "loop", "device": "cpu"})


def _essence(recipe: Recipe) -> str:
    values = recipe.to_dict()
    return repr(values | {"seed": 0, "training": values["training"] | {"lr": 0.0}})
