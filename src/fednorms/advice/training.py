"""Train the trials of a tournament: each continues its run of the rung before, and what is done is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fednorms.advice.tournament import Played, Rung, Trial
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.options import nearest
from fednorms.core.training import Training
from fednorms.data import Federation
from fednorms.methods.registry import method as read_method
from fednorms.runs.cells import Cell, CellEvent, Outcome, Watch, run_cells
from fednorms.runs.driver import recipe_to_resume, with_rounds
from fednorms.runs.identity import Custom
from fednorms.runs.progress import CellWatch
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import slug
from fednorms.runs.store.atomic import clear_errors, write_atomic
from fednorms.runs.store.directory import RunDirectory

FILE = "trials.json"


@dataclass
class Trainer:
    """Trains trials on validation data in a folder; call `play`.

    A run of a later rung continues the checkpoint of the rung before, with the bits of one long run. A method or a
    schedule that depends on the number of rounds starts anew in every rung (`restarted` names them).
    """

    recipe: Recipe
    federation: Federation
    custom: Custom
    folder: Path
    every: int = 1  # rounds between two validations
    jobs: int = 1
    watch: Watch = lambda event: None
    restarted: set[str] = field(default_factory=set)
    done: dict[str, Played] = field(default_factory=dict)
    fresh: bool = False  # whether the last `play` trained anything
    failed: set[str] = field(default_factory=set)  # not stored, so the same call tries them again

    def __post_init__(self) -> None:
        try:
            stored = json.loads((self.folder / FILE).read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.folder / FILE} cannot be read ({error}). Choose another folder.") from None
        self.done = {key: Played.from_dict(values) for key, values in stored.items()}

    def play(self, jobs: Sequence[tuple[Trial, int]], rounds: int) -> list[Played]:
        """Train trials, each with a seed, up to a round, `self.jobs` at a time."""
        missing = {(t.name, seed): t for t, seed in jobs if _key(t, seed, rounds) not in self.done}

        def tell(event: CellEvent) -> None:
            self.watch(event)
            if event.outcome is not None:
                trial = missing[event.label, event.seed]
                self.done[_key(trial, event.seed, rounds)] = self._played(trial, event.seed, rounds, event.outcome)
                self._write()

        self.fresh = bool(missing)
        cells = [self._cell(t, seed, rounds) for (_, seed), t in missing.items()]
        if cells:
            run_cells(cells, self.jobs, replace(self.custom, federation=self.federation), tell)
        return [self.done[_key(t, seed, rounds)] for t, seed in jobs]

    def most_rounds(self, rungs: Sequence[Rung], trials: int) -> int:
        """Rounds of training in all rungs, at most."""
        total, before = 0, 0
        for rung in rungs:
            total += min(rung.trials, trials) * (rung.rounds - before + rung.rounds * (len(rung.seeds) - 1))
            before = rung.rounds
        return total

    def path(self, trial: Trial, seed: int, rounds: int) -> Path:
        """The directory of a run."""
        anew = f"-{rounds}" if self._bound(trial) else ""
        return self.folder / "runs" / f"{slug(trial.name)}-{seed}{anew}"

    def recipe_of(self, trial: Trial, seed: int, rounds: int) -> Recipe:
        """The run that tries a trial: it validates, and tests nothing."""
        return trial_recipe(self.recipe, trial).model_copy(
            update={
                "seed": seed,
                "rounds": rounds,
                "evaluate": [],
                "evaluate_every": self.every,
                "validate_every": None,
                "checkpoint_every": self.every,
            }
        )

    def _cell(self, trial: Trial, seed: int, rounds: int) -> Cell:
        path = self.path(trial, seed, rounds)
        directory, label = RunDirectory(path), trial.name
        if directory.recipe.exists() and not self._bound(trial):
            stored = recipe_to_resume(directory, self.custom.model, self.custom.loss, self.custom.training)
            if stored.rounds < rounds:
                return Cell(label, with_rounds(stored, directory, rounds), path, changed={"rounds": rounds})
        return Cell(label, self.recipe_of(trial, seed, rounds), path)

    def _bound(self, trial: Trial) -> bool:
        recipe = trial_recipe(self.recipe, trial)
        bound = recipe.whole_method().bound_to_rounds or recipe.training.schedule in ("step", "cosine")
        if bound:
            self.restarted.add(trial.arm)
        return bool(bound)

    def _played(self, trial: Trial, seed: int, rounds: int, outcome: Outcome) -> Played:
        seconds = sum(r.seconds for r in outcome.rounds)
        if outcome.status == "failed":
            self.failed.add(_key(trial, seed, rounds))
        if outcome.error:
            return Played(trial, seed, rounds, None, seconds=seconds, error=outcome.error)
        name = f"{outcome.headline}/val"
        scores = outcome.last[name]
        metric = self.recipe.adopting(self.federation.protocol).metric
        curve = [(r.number, r.tests[name].mean) for r in outcome.rounds if name in r.tests]
        sites = {site: (round(s.accuracy * s.samples), s.samples) for site, s in scores.sites.items()}
        return Played(trial, seed, rounds, scores.judged(metric), curve, sites, seconds)

    def _write(self) -> None:
        with clear_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            stored = {key: played.to_dict() for key, played in self.done.items() if key not in self.failed}
            write_atomic(self.folder / FILE, (json.dumps(stored, indent=1) + "\n").encode())


def counting(watch: CellWatch) -> Watch:
    """Count rounds only: a run that ends in one rung continues in the next."""

    def tell(event: CellEvent) -> None:
        if event.outcome is None:
            watch(event)

    return tell


def _key(trial: Trial, seed: int, rounds: int) -> str:
    return f"{trial.name}, seed {seed}, round {rounds}"


def trial_recipe(recipe: Recipe, trial: Trial) -> Recipe:
    """A recipe with a trial's method and values: fields of local training, or options of the method's parts.

    >>> trial_recipe(Recipe(), Trial("fedprox", "fedprox", {"lr": 0.1, "mu": 0.5})).method
    'fedprox(mu=0.5)'
    """
    training = {k: v for k, v in trial.values.items() if k in vars(Training())}
    options = {k: v for k, v in trial.values.items() if k not in training}
    text = with_options(trial.method, options) if options else trial.method
    return Recipe.make(recipe.model_dump() | {"method": text, "training": vars(recipe.training) | training})


def with_options(method: str, options: Mapping[str, Any]) -> str:
    """A method with other options of its parts, by name, or as PART.NAME where several parts have it."""
    parts = list(read_method(method).parts)
    for key, value in options.items():
        owner, _, name = key.rpartition(".")
        having = [i for i, p in enumerate(parts) if name in vars(p) and owner in ("", p.name)]
        if len(having) != 1:
            known = sorted(f"{p.name}.{o}" if having else o for p in parts for o in vars(p))
            why = "several parts have it" if having else nearest(key, [*known, "lr"])
            raise BadInput(f'Method "{method}" has no option "{key}" to search: {why}.')
        parts[having[0]] = replace(parts[having[0]], **{name: value})  # type: ignore[type-var]
    return str(Method(tuple(parts)))
