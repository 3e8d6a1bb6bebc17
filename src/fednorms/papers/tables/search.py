"""Search: choose values that a paper leaves open by their score on validation images, never on test images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any

from fednorms.core.errors import BadInput, RunFailed
from fednorms.data.packed import SUFFIX
from fednorms.data.readers import READERS
from fednorms.papers.tables.plan import Found, recipe_for
from fednorms.papers.tables.record import Values, error_of, made, plain, same_run
from fednorms.papers.tables.store import ResultStore
from fednorms.papers.tables.table import Row, Setting, Table, as_recipe
from fednorms.runs.cells import Outcome
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import slug

Point = dict[str, Any]


@dataclass
class Search:
    """The search of one row in one setting: every point of its grid with every seed of the search."""

    table: Table
    setting: Setting
    row: Row
    store: ResultStore
    runs: list[Values] = field(default_factory=list)
    failed: list[Values] = field(default_factory=list)
    about: Values = field(default_factory=dict)
    metric: str = "accuracy"
    stored: Values = field(default_factory=dict)  # as it is stored
    foreign: bool = False  # the stored one was made with other data

    @property
    def seeds(self) -> range:
        """The seeds of every point, independent of those of the table's rows."""
        return range(self.table.search_seeds)

    @property
    def points(self) -> list[Point]:
        """All combinations of the grid's values, by dotted key."""
        return [dict(zip(self.row.search, values, strict=True)) for values in product(*self.row.search.values())]

    def recipe(self, point: Point, seed: int) -> Recipe:
        """The run that tries a point: the row's recipe, tested only on validation images."""
        recipe = recipe_for(self.table, self.setting, self.row, seed, as_recipe(point))
        last = self.table.selection == "last"
        data = recipe.data.model_copy(update={"protocol": validation_protocol(recipe)})
        every = recipe.rounds if last else recipe.evaluate_every
        tests = {"evaluate": [], "evaluate_every": every, "validate_every": None}
        return recipe.model_copy(update={"data": data, **tests})

    @property
    def missing(self) -> list[tuple[Point, int]]:
        """What has not run yet, or has failed."""
        ran = [(r["values"], r["seed"]) for r in self.runs]
        return [(p, s) for p in self.points for s in self.seeds if (p, s) not in ran]

    @property
    def begun(self) -> bool:
        """Whether any of its runs has ended."""
        return bool(self.runs or self.failed)

    @property
    def ended(self) -> bool:
        """Whether every point has run with every seed, or diverged."""
        return not self.missing

    @property
    def means(self) -> list[tuple[Point, float | None]]:
        """Mean validation score of every point in percent; None if a run diverged or is missing."""
        out: list[tuple[Point, float | None]] = []
        for point in self.points:
            vals = [r["val"] for r in self.runs if r["values"] == point and r["seed"] in self.seeds]
            out.append((point, 100 * fmean(vals) if vals and None not in vals else None))
        return out

    @property
    def chosen(self) -> Point | None:
        """The best point once the search has ended (the first of equals); None if every point diverged."""
        scored = [(p, m) for p, m in self.means if m is not None]
        return max(scored, key=lambda item: item[1])[0] if self.ended and scored else None

    @property
    def diverged(self) -> bool:
        """Whether every point diverged."""
        return self.ended and self.chosen is None

    @property
    def at_edge(self) -> list[str]:
        """Keys whose chosen value is the smallest or the largest of the grid."""
        point = self.chosen or {}
        grids = {key: values for key, values in self.row.search.items() if all(type(v) in (int, float) for v in values)}
        return [k for k, v in grids.items() if k in point and len(v) > 1 and point[k] in (min(v), max(v))]

    def add(self, point: Point, seed: int, outcome: Outcome, recipe: Recipe) -> None:
        """Store a run. One that diverged is worse than any other; one that failed is tried again next time."""
        self.failed = [r for r in self.failed if (r["values"], r["seed"]) != (point, seed)]
        if outcome.status == "failed":
            self.failed.append({"values": point, "seed": seed, "error": error_of(outcome, recipe)})
            self.write(recipe, point)
            return
        val = None
        if outcome.status == "done":
            scores = outcome.at_best if outcome.best and self.table.selection == "best-val" else outcome.last
            validated = scores.get(f"{outcome.headline}/val")
            if validated is None:
                raise RunFailed(f"{self.setting.name} / {self.row.name}: the search has no validation images.")
            self.metric = recipe.metric
            val = round(validated.judged(self.metric), 6)
        seconds = round(sum(r.seconds for r in outcome.rounds), 3)
        self.runs = [r for r in self.runs if (r["values"], r["seed"]) != (point, seed)]
        why = {"error": error_of(outcome, recipe)} if val is None else {}
        self.runs.append({"values": point, "seed": seed, "val": val, "seconds": seconds, **why})
        self.runs.sort(key=lambda r: (self.points.index(r["values"]), r["seed"]))
        self.write(recipe, point)

    def write(self, recipe: Recipe, point: Point) -> None:
        """Store everything so far, with the recipe of one point."""
        self.stored = {
            **self.about,
            "status": "searching" if not self.ended else "diverged" if self.diverged else "done",
            **made(),
            "grid": self.row.search,
            "metric": self.metric,
            "scores": [{"values": p, "mean": None if m is None else round(m, 3)} for p, m in self.means],
            "chosen": self.chosen,
            "at_edge": self.at_edge,
            "runs": self.runs,
            "failed": self.failed,
            "recipe_of": point,
            "recipe": plain(recipe),
        }
        self.store.save_search(self.setting, self.row, self.stored)

    def sentence(self) -> str:
        """The outcome of the search in one sentence."""
        who = f"{self.row.name} ({self.setting.name})"
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        if not self.ended:
            failed = f"; {len(self.failed)} of its runs failed" if self.failed else ""
            return f"{who}: the search over {', '.join(self.row.search)} has not ended{failed}."
        if self.chosen is None:
            tried = "; ".join(shown(p) for p in self.points)
            return f"{who}: all values of the search diverged ({tried}; {seeds}), so the row counts as diverged."
        tried = ", ".join(f"{shown(p)}: {'diverged' if m is None else f'{m:.1f} %'}" for p, m in self.means)
        edge = "; the chosen value is at the edge of the grid" if self.at_edge else ""
        metric = self.metric.replace("_", " ")
        return f"{who}: {shown(self.chosen)} was chosen by {metric} on validation images ({tried}; {seeds}){edge}."

    def as_diverged(self) -> Values:
        """The record of a row whose search gave no value: the row counts as diverged."""
        old = {"version": "unknown", "torch": "unknown"}  # the oldest searches do not say
        return {**old, **self.stored, "status": "diverged"}

    def as_failed(self) -> list[Values]:
        """The failed runs of the search in the form of failed runs of the row."""
        return [
            {
                **self.stored,
                "status": "failed",
                "error": f"in the search, {shown(run['values'])}: {run['error']}",
                "recipe": {**self.stored["recipe"], "seed": run["seed"]},
            }
            for run in self.failed
        ]


def open_search(
    store: ResultStore,
    table: Table,
    setting: Setting,
    row: Row,
    fingerprint: Callable[[Setting, Recipe], str | None] = lambda setting, recipe: None,
) -> Search:
    """Open the search of a row: as stored in the output folder, or finished among the results of the table itself.

    `fingerprint` gives that of a setting's data, or None if the data are not available. A search on other data does not
    count.
    """
    search = Search(table, setting, row, store)
    stores = [store]
    if table.results and table.results != store.out.resolve():
        stores.append(ResultStore(table.results))
    for place in stores:
        values = place.search(setting, row)
        if values is None or values.get("grid") != row.search:
            continue
        recipe = search.recipe(values["recipe_of"], values["recipe"]["seed"])
        if same_run(values["recipe"], recipe):
            if fingerprint(setting, recipe) not in (None, values["recipe"]["fingerprint"]):
                search = replace(search, foreign=True)
                continue
            failed = values.get("failed", [])
            found = replace(search, runs=values["runs"], failed=failed, metric=values["metric"], stored=values)
            if found.ended or place == store:
                return found
    return search


def with_searches(found: Found, searches: Mapping[tuple[str, str], Search]) -> Found:
    """Add rows that have no runs because all runs of their search diverged, or some failed."""
    for key, search in searches.items():
        if search.diverged:
            found.done[key] = [search.as_diverged()]
        elif not search.ended and search.failed:
            found.failed[key] = search.as_failed()
    return found


def without_validation(setting: Setting, row: Row, recipe: Recipe) -> BadInput:
    """The error of a search without validation images, with advice that fits the data set."""
    reader, named, advice = READERS.get(recipe.federation), recipe.federation, ""
    packed = named.startswith("pack:") or named.endswith(SUFFIX)
    if reader is not None:
        protocol = recipe.data.protocol or next(iter(reader.protocols))
        named += f" ({protocol})"
        others = ", ".join(p for p in reader.protocols if p != protocol)
        advice = f"the setting another protocol, if one has some ({others}), or " if others else ""
    if not packed:
        advice += "the setting data.val above 0 (unless its data come with a split), or "
    return BadInput(
        f'Row "{row.name}", setting "{setting.name}": a search needs validation images, but {named} has none. '
        f"Give {advice}the row a value instead of a search."
    )


def validation_protocol(recipe: Recipe) -> str:
    """The variant of a protocol that holds out validation images, if the data set has one.

    >>> validation_protocol(Recipe(federation="digits-five", data={"protocol": "fedwon"}))
    'fedwon-val'
    """
    if recipe.federation not in READERS:
        return recipe.data.protocol
    known = READERS[recipe.federation].protocols
    protocol = recipe.data.protocol or next(iter(known))
    return f"{protocol}-val" if f"{protocol}-val" in known else recipe.data.protocol


def shown(point: Mapping[str, Any]) -> str:
    """A point in words.

    >>> shown({"training.lr": 0.1})
    'lr 0.1'
    """
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.items())


def point_slug(point: Mapping[str, Any], seed: int) -> str:
    """The folder name of a point and a seed.

    >>> point_slug({"training.lr": 0.1}, 2)
    'lr-0.1-seed-2'
    """
    return slug(shown(point).replace(" ", "-") + f"-seed-{seed}")
