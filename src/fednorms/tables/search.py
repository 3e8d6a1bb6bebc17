"""Search: values that a paper leaves open, chosen by their score on validation images, never on test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fednorms.data.readers import READERS
from fednorms.errors import RunFailed
from fednorms.evaluation.scores import judged_by
from fednorms.runs.cells import Outcome
from fednorms.runs.compare import slug
from fednorms.runs.recipe import Recipe
from fednorms.tables.plan import Shelf, recipe_for
from fednorms.tables.record import Values, plain, read_record, same_run, write_record
from fednorms.tables.table import Row, Setting, Table, merged, nested

Point = dict[str, Any]


@dataclass
class Search:
    """The search of one row in one setting: every point of its grid with every seed, as far as they have run."""

    table: Table
    setting: Setting
    row: Row
    path: Path
    runs: list[Values] = field(default_factory=list)
    about: Values = field(default_factory=dict)
    metric: str = "accuracy"

    @property
    def points(self) -> list[Point]:
        """All combinations of the grid's values, by dotted key."""
        return [dict(zip(self.row.search, values, strict=True)) for values in product(*self.row.search.values())]

    def recipe(self, point: Point, seed: int) -> Recipe:
        """The run that tries a point: the row's own recipe, tested on validation images and nothing else."""
        recipe = recipe_for(self.table, self.setting, self.row, seed, tree(point))
        last = self.table.selection == "last"
        data = recipe.data.model_copy(update={"protocol": validation_protocol(recipe)})
        every = recipe.rounds if last else recipe.evaluate_every
        return recipe.model_copy(update={"data": data, "evaluate": [], "evaluate_every": every})

    def missing(self, seeds: Sequence[int]) -> list[tuple[Point, int]]:
        """What has not run yet; nothing, if the search was finished with other seeds."""
        if self.chosen is not None:
            return []
        return [(p, s) for p in self.points for s in seeds if not self._run(p, s)]

    @property
    def _seeds(self) -> list[int]:
        return sorted({r["seed"] for r in self.runs})

    def _run(self, point: Point, seed: int) -> Values | None:
        return next((r for r in self.runs if r["values"] == point and r["seed"] == seed), None)

    def _complete(self, seeds: Sequence[int]) -> bool:
        return bool(seeds) and all(self._run(p, s) for p in self.points for s in seeds)

    @property
    def means(self) -> list[tuple[Point, float | None]]:
        """Validation score of every point in per cent, mean over seeds; None where a run diverged or is missing."""
        out: list[tuple[Point, float | None]] = []
        for point in self.points:
            vals = [r["val"] for r in self.runs if r["values"] == point]
            out.append((point, 100 * fmean(vals) if vals and None not in vals else None))
        return out

    @property
    def chosen(self) -> Point | None:
        """The best point, once every point has run with every seed; the first of equals."""
        if not self._complete(self._seeds):
            return None
        scored = [(p, m) for p, m in self.means if m is not None]
        return max(scored, key=lambda item: item[1])[0] if scored else None

    @property
    def at_edge(self) -> list[str]:
        """Keys whose chosen value is the smallest or largest of three or more numbers, or of two."""
        point = self.chosen or {}
        grids = {key: values for key, values in self.row.search.items() if all(type(v) in (int, float) for v in values)}
        return [k for k, v in grids.items() if k in point and len(v) > 1 and point[k] in (min(v), max(v))]

    def add(self, point: Point, seed: int, outcome: Outcome, recipe: Recipe) -> None:
        """Take in a finished run; one that diverged counts as worse than any other."""
        if outcome.error and outcome.kind != "Diverged":
            return
        val = None
        if not outcome.error:
            name = f"{outcome.headline}/val"
            at = outcome.best if self.table.selection == "best-val" else None
            rows = [r for r in outcome.history if name in r["scores"] and (at is None or r["round"] == at["round"])]
            if not rows:
                raise RunFailed(f"{self.setting.name} / {self.row.name}: a search without validation images")
            self.metric = recipe.metric
            val = round(rows[-1]["scores"][name][judged_by(self.metric)], 6)
        seconds = round(sum(r["seconds"] for r in outcome.history), 3)
        self.runs = [r for r in self.runs if (r["values"], r["seed"]) != (point, seed)]
        self.runs.append({"values": point, "seed": seed, "val": val, "seconds": seconds})
        self.runs.sort(key=lambda r: (self.points.index(r["values"]), r["seed"]))
        self.write(recipe, point)

    def write(self, recipe: Recipe, point: Point) -> None:
        """Write what is known so far, with the recipe of one point."""
        values = {
            **self.about,
            "status": "done" if self.chosen else "searching",
            "date": f"{datetime.now().astimezone():%Y-%m-%d}",
            "grid": self.row.search,
            "metric": self.metric,
            "scores": [{"values": p, "mean": None if m is None else round(m, 3)} for p, m in self.means],
            "chosen": self.chosen,
            "at_edge": self.at_edge,
            "runs": self.runs,
            "recipe_of": point,
            "recipe": plain(recipe),
        }
        write_record(self.path, values)

    def sentence(self) -> str:
        """What the search found, for the table's notes."""
        if self.chosen is None:
            return f"{self.row.name} ({self.setting.name}): the search of {', '.join(self.row.search)} has not ended."
        tried = ", ".join(f"{shown(p)}: {'diverged' if m is None else f'{m:.1f} %'}" for p, m in self.means)
        edge = "; the chosen value lies at the edge of the grid" if self.at_edge else ""
        seeds = f"{len(self._seeds)} seed{'s' * (len(self._seeds) > 1)}"
        metric = self.metric.replace("_", " ")
        return (
            f"{self.row.name} ({self.setting.name}): {shown(self.chosen)} was chosen by {metric} on validation images "
            f"({tried}; {seeds}){edge}."
        )


def open_search(shelf: Shelf, table: Table, setting: Setting, row: Row) -> Search:
    """The search of a row as far as it is stored: in the output folder, or finished beside the table itself."""
    search = Search(table, setting, row, shelf.search(setting, row))
    places = [search.path]
    if table.path and table.path.resolve() != shelf.out.resolve():
        places.append(Shelf(table.path).search(setting, row))
    for place in places:
        values = read_record(place)
        if values is None or values.get("grid") != row.search or not values["runs"]:
            continue
        if same_run(values["recipe"], search.recipe(values["recipe_of"], values["recipe"]["seed"])):
            search.runs, search.metric = values["runs"], values["metric"]
            if search.chosen is not None or place == search.path:
                return search
            search.runs = []
    return search


def validation_protocol(recipe: Recipe) -> str:
    """The protocol of a data set that holds validation images out of a protocol's training images, if there is one.

    >>> validation_protocol(Recipe(federation="digits-five", data={"protocol": "fedwon"}))
    'fedwon-val'
    """
    if recipe.federation not in READERS:
        return recipe.data.protocol
    known = READERS[recipe.federation].protocols
    protocol = recipe.data.protocol or next(iter(known))
    return f"{protocol}-val" if f"{protocol}-val" in known else recipe.data.protocol


def tree(point: Mapping[str, Any]) -> Values:
    """A point of a grid as values of a recipe.

    >>> tree({"training.lr": 0.1, "rounds": 3})
    {'training': {'lr': 0.1}, 'rounds': 3}
    """
    values: Values = {}
    for key, value in point.items():
        values = merged(values, nested(key, value))
    return values


def shown(point: Mapping[str, Any]) -> str:
    """A point in words.

    >>> shown({"training.lr": 0.1})
    'lr 0.1'
    """
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.items())


def point_slug(point: Mapping[str, Any], seed: int) -> str:
    """A point and a seed as the name of a folder.

    >>> point_slug({"training.lr": 0.1}, 2)
    'lr-0.1-seed-2'
    """
    return slug(shown(point).replace(" ", "-") + f"-seed-{seed}")
