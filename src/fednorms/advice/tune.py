"""tune: the best learning rate, and options, of one method, by the tournament that `advise` uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from fednorms.advice.arms import default_rates
from fednorms.advice.plan import kept_folder, recorded
from fednorms.advice.remarks import remarks
from fednorms.advice.setting import Setting
from fednorms.advice.tournament import Rungs, Trial, ladder, tournament
from fednorms.advice.training import Trainer, counting, trial_recipe
from fednorms.core.errors import BadInput
from fednorms.core.markup import aligned, html_page, html_table
from fednorms.core.method import Method
from fednorms.core.part import Part
from fednorms.data import Federation
from fednorms.methods.registry import method as read_method
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import option
from fednorms.runs.progress import CellWatch, Reporter, is_wanted
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.atomic import write_atomic

FILE = "tuned.json"


@dataclass
class Tuned:
    """The best values of a method's search, with the scores of all that were tried; the repr is a table.

    Scores are shares of validation images. `notes` say where a value is at the edge of its grid and where the curve
    still rises.
    """

    method: str
    recipe: Recipe
    grid: Mapping[str, Sequence[Any]]
    rungs: list[Rungs]
    notes: list[str] = field(default_factory=list)
    path: Path | None = None

    @property
    def best(self) -> Trial:
        """The best point of the grid."""
        return self.rungs[-1].ranking[0][0]

    @property
    def values(self) -> dict[str, Any]:
        """Its values: the learning rate, and options of the method."""
        return dict(self.best.values)

    @property
    def score(self) -> float:
        """Its mean validation score over seeds."""
        return self.rungs[-1].ranking[0][1]

    def tuned_recipe(self) -> Recipe:
        """The recipe with these values."""
        return trial_recipe(self.recipe, self.best)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows: dict[str, list[str]] = {}
        for rung in reversed(self.rungs):
            for trial, score in rung.ranking:
                shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in trial.values.values()]
                seeds = str(len(rung.rung.seeds))
                rows.setdefault(trial.name, [*shown, str(rung.rung.rounds), seeds, f"{100 * score:.1f}"])
            for p in rung.played:
                shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in p.trial.values.values()]
                rows.setdefault(p.trial.name, [*shown, str(rung.rung.rounds), "1", "diverged"])
        return [*self.grid, "rounds", "seeds", "validation (%)"], list(rows.values())

    def __repr__(self) -> str:
        header, rows = self._table()
        lines = [f"{self.best.name}: {100 * self.score:.1f} % on validation images", *aligned([header, *rows])]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return html_page(self.best.name, html_table(*self._table(), numbers_from=0), notes=self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "kind": "tuned",
            "method": self.method,
            "values": self.values,
            "score": self.score,
            "grid": {key: list(values) for key, values in self.grid.items()},
            "rungs": [rung.to_dict() for rung in self.rungs],
            "notes": self.notes,
            "recipe": self.tuned_recipe().to_dict(),
            "path": None if self.path is None else str(self.path),
        }


def tune(
    method: str | Method | Part,
    federation: str | Path | Federation | None = None,
    model: str | nn.Module | None = None,
    rounds: int | None = None,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 2,
    loss: str | Loss | None = None,
    batch_size: int | None = None,
    participation: str | None = None,
    device: str | None = None,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    progress: bool | None = None,
) -> Tuned:
    """Search the learning rate and options of one method on validation images; test images are never read.

    `grid` has the values to try: `{"lr": [0.03, 0.1], "mu": [0.01, 0.1]}` with fields of local training and options of
    the method. By default three learning rates that suit the method. All points train for a third of the rounds, the
    best third in full, the best two with `seeds` seeds. With `out`, the same call continues after an interruption.

    >>> tuned = tune("fedprox", "digits-shift", rounds=2, grid={"lr": [0.01, 0.1], "mu": [0.1]}, seeds=1)
    >>> tuned.values["lr"] in (0.01, 0.1), tuned.tuned_recipe().method
    (True, 'fedprox(mu=0.1)')
    """
    text = str(read_method(method))
    label = method.strip() if isinstance(method, str) else text
    changes = {"rounds": rounds, "participation": participation, "device": device, "method": text}
    setting = Setting.of(federation, model, loss, recipe, changes, {"batch_size": batch_size})
    search = dict(grid) if grid else {"lr": default_rates(text, setting.recipe.training.optimizer)}
    _check(search, seeds, jobs)
    trials = [Trial(label, text, dict(zip(search, point, strict=True))) for point in product(*search.values())]
    for trial in trials:
        trial_recipe(setting.trials, trial)  # an option that the method does not have is an error now
    first = setting.recipe.seed
    rungs = ladder(setting.recipe.rounds, 1, prod(map(len, search.values())), range(first, first + seeds))
    keep = out is not None
    with kept_folder(out) as folder:
        asked = {"recipe": setting.recipe.to_dict(), "data": setting.held.fingerprint(), "grid": search, "seeds": seeds}
        recorded(folder, asked, dict)
        every = max(1, rungs[0].rounds // 4)
        trainer = Trainer(setting.trials, setting.held, setting.custom, folder, every, jobs)
        with Reporter(f"tune {label}", trainer.most_rounds(rungs, len(trials)), silent=not is_wanted(progress)) as told:
            trainer.watch = counting(CellWatch(told))
            done = tournament(trials, rungs, trainer.play)
        if not done[-1].ranking:
            reasons = sorted({p.error for p in done[-1].played})
            raise BadInput(f"tune: every run of {label} failed. {reasons[0]} Try smaller learning rates.")
        tuned = Tuned(label, setting.recipe, search, done, list(setting.notes), folder if keep else None)
        curve = next(p.curve for p in done[-1].played if p.trial.name == tuned.best.name)
        tuned.notes += remarks(tuned.best, search, curve)
        if trainer.restarted:
            tuned.notes.append(f"{label} depends on the number of rounds, so every rung started anew.")
        if keep:
            write_atomic(folder / FILE, (json.dumps(tuned.to_dict(), indent=2) + "\n").encode())
        return tuned


def _check(grid: Mapping[str, Sequence[Any]], seeds: int, jobs: int) -> None:
    problems = [f"{key} has no values" for key, values in grid.items() if not len(values)]
    for name, number in (("seeds", seeds), ("jobs", jobs)):
        if number < 1:
            problems.append(f"{option(name)} must be an integer >= 1, got {number}")
    if problems:
        raise BadInput("tune: " + "; ".join(problems) + ".")


@dataclass(frozen=True)
class SearchedRates:
    """The learning rates of several methods, and what a reader of their comparison should know."""

    rates: dict[str, float]
    notes: list[str]


def search_rates(
    methods: Sequence[str],
    given: Mapping[str, float],
    recipe: Recipe,
    out: Path,
    *,
    jobs: int = 1,
    progress: bool | None = None,
) -> SearchedRates:
    """Search the rate of every method that has none in `given`, each in a folder of `out`."""
    from fednorms.runs.run_names import slug

    rates, notes = dict(given), []
    for name in methods:
        if name in given:
            notes.append(f"{name}: lr {given[name]:g} was given, not searched")
            continue
        tuned = tune(name, recipe=recipe, out=out / slug(name), seeds=1, jobs=jobs, progress=progress)
        rates[name] = float(tuned.values["lr"])
        tried = ", ".join(f"{rate:g}" for rate in tuned.grid["lr"])
        notes.append(f"{name}: lr {rates[name]:g} was chosen on validation images from {tried}")
        notes += tuned.notes
    return SearchedRates(rates, notes)
