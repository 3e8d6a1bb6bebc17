"""A published table or figure as a file: protocol, rows, columns, printed numbers, tolerance and known deviations."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.papers.analysis.measures import analysis_named
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.validation import may_test, missing_mode
from fednorms.runs.compare import slug
from fednorms.runs.recipe import Recipe

FILE = "table.toml"
_OF_A_RUN = ("seed", "device", "engine", "version", "fingerprint")


class Printed(NamedTuple):
    """A printed number, in the table's unit; `std` where the paper gives one. Failed training stands below all."""

    mean: float
    std: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the paper reports that training failed."""
        return self.mean == -math.inf


def _printed(value: object) -> object:
    if value == "failed":
        return Printed(-math.inf)
    numbers = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= 2 or not all(type(n) in (int, float) for n in numbers):
        raise ValueError(f'expected a number, [mean, std] or "failed", got {value!r}')
    return Printed(*map(float, numbers))


class Reason(NamedTuple):
    """Why a column is never judged; `when` limits that to data of one layout (as `fednorms data check` names it)."""

    why: str
    when: str = ""


def _reason(value: object) -> object:
    if isinstance(value, str):
        return Reason(value)
    if isinstance(value, dict) and set(value) <= {"why", "when"} and "why" in value:
        return Reason(**{k: str(v) for k, v in value.items()})
    raise ValueError(f'expected why, as text, or {{ why = "...", when = "a layout" }}, got {value!r}')


_FORBID = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Setting(BaseModel):
    """One data set, division or batch size: every row of the table is one recipe in it."""

    model_config = _FORBID

    name: str = Field(min_length=1)
    """Short name, used for folders and in rows."""
    title: str = ""
    """As it stands above the table (default: the name)."""
    recipe: dict[str, Any] = {}
    """Merged over the table's recipe."""
    columns: dict[str, str] = Field(min_length=1)
    """Column to selector, as "Avg" to "mean"."""
    incomparable: dict[str, Annotated[Reason, BeforeValidator(_reason)]] = {}
    """Columns that are shown and never judged, and why."""
    store: list[Literal["curve", "model", "rounds"]] = []
    """What is kept of every run: accuracy by round, its directory, or that with a checkpoint per `checkpoint_every`."""
    derived: list[str] = []
    """Columns whose printed numbers were computed from other columns: judged, but not counted once more."""
    counts: bool = True
    """False for a reading beside the printed one, with its numbers beside it: judged, but not counted."""
    ranked: str = ""
    """The column by which rows are ranked, the best first (default: rows stand as in the file)."""

    @property
    def slug(self) -> str:
        """The name as a folder."""
        return slug(self.name)

    @cached_property
    def selectors(self) -> dict[str, Selector]:
        """The columns, read."""
        return {column: Selector.read(text) for column, text in self.columns.items()}

    @property
    def keeps_run(self) -> bool:
        """Whether the directories of its runs stay."""
        return "model" in self.store or "rounds" in self.store

    @property
    def keeps_curve(self) -> bool:
        """Whether the accuracy of every tested round is kept."""
        return "curve" in self.store or any(s.needs_curve for s in self.selectors.values())


class Row(BaseModel):
    """One method, and what the paper printed for it."""

    model_config = _FORBID

    name: str = Field(min_length=1)
    """As printed."""
    method: str
    """Parts joined by +, as in a recipe."""
    settings: list[str] | None = None
    """The settings it stands in (default: all)."""
    recipe: dict[str, Any] = {}
    """Merged over the setting's recipe."""
    at: dict[str, dict[str, Any]] = {}
    """Per setting: merged last; may name another `method`, too."""
    published: dict[str, dict[str, Annotated[Printed, BeforeValidator(_printed)]]] = {}
    """Per setting and column: what was printed; absent where nothing was."""
    counts: bool = True
    """False for a row that print does not have, or not as a target, with its numbers beside it: judged, not counted."""
    averages: dict[str, Annotated[Printed, BeforeValidator(_printed)]] = {}
    """What was printed as the row's averages over settings, by the table's names of them."""
    search: dict[str, list[Any]] = {}
    """Key of the recipe to values that are tried on validation images; the best one is used."""

    @property
    def slug(self) -> str:
        """The name as a folder."""
        return slug(self.name)

    def stands_in(self, setting: Setting) -> bool:
        """Whether the row has runs in a setting."""
        return self.settings is None or setting.name in self.settings


class Ladder(BaseModel):
    """What a figure has as its axis: settings, or rows, that step through one quantity."""

    model_config = _FORBID

    label: str = Field(min_length=1)
    """The quantity, as "clients"."""
    column: str
    """The column that is drawn over it."""
    settings: dict[str, str] = {}
    """Setting to its step, as "clients-5" to "5": every row is a line."""
    rows: dict[str, str] = {}
    """Row to its step: every setting is a line."""


class Table(BaseModel):
    """A published table or figure: settings times rows times seeds are its runs.

    >>> table = Table.make({
    ...     "paper": "fednorms", "label": "Demo", "title": "Two methods",
    ...     "recipe": {"rounds": 2, "data": {"size": 8}},
    ...     "settings": [{"name": "digits", "columns": {"Avg": "mean"}}],
    ...     "rows": [{"name": "FedBN", "method": "fedbn", "published": {"digits": {"Avg": [80, 0.5]}}}],
    ... })
    >>> table.recipe_of(table.settings[0], table.rows[0], {"seed": 1}).data.size
    8
    """

    model_config = _FORBID

    paper: str
    """FedNN, GReg, FedWon, FedFN, or fednorms for tables of our own."""
    label: str
    """As printed: "Table 1"."""
    title: str
    """What it shows."""
    kind: Literal["table", "figure"] = "table"
    analysis: str = ""
    """What a figure measures in its runs, by the name of an analysis: its accuracies are then not what it prints."""
    tolerance: float = Field(default=3.0, ge=0)
    """Points by which a number may be worse than print; better is never a miss."""
    seeds: int = Field(default=3, ge=1)
    """How many seeds, from 0."""
    search_seeds: int = Field(default=1, ge=1)
    """How many seeds, from 0, try every value of a search. A search picks, and the seeds of the row then measure what
    it picked: it can do with fewer, and must not pick otherwise because somebody asks for another number of runs."""
    selection: Literal["last", "best-val"] = "last"
    """Which round is reported."""
    notes: list[str] = []
    """Known deviations and choices, one sentence each."""
    recipe: dict[str, Any] = {}
    """Keys of a recipe that all runs share."""
    settings: list[Setting] = Field(min_length=1)
    rows: list[Row] = Field(min_length=1)
    averages: dict[str, dict[str, str]] = {}
    """Printed averages over settings: name to setting to the column of it that is averaged."""
    ladder: Ladder | None = None
    """The axis of a figure over settings or over rows."""
    path: Path | None = Field(default=None, exclude=True)
    """The file it was read from."""

    @property
    def name(self) -> str:
        """Its name on the command line: FOLDER for FOLDER/table.toml, PAPER-table-1 for PAPER/table-1.toml."""
        if self.path is None:
            return slug(f"{self.paper}-{self.label}")
        folder = self.path.parent.name
        return folder if self.path.name == FILE else f"{folder}-{self.path.stem}"

    @property
    def results(self) -> Path | None:
        """The folder of results that come with the table: FOLDER for FOLDER/table.toml, otherwise results/NAME next
        to the paper's folder.
        """
        if self.path is None:
            return None
        return self.path.parent if self.path.name == FILE else self.path.parents[1] / "results" / self.name

    @property
    def heading(self) -> str:
        """Paper, label and title in one line."""
        return f"{self.paper} {self.label}: {self.title}"

    @property
    def in_print(self) -> bool:
        """Whether any number of it was printed; a table of one's own has ours alone."""
        return any(printed for row in self.rows for printed in (*row.published.values(), row.averages))

    @classmethod
    def read(cls, file: Path) -> Table:
        """Read a table's file; every problem is reported at once."""
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise BadInput(f"{file} is not valid TOML: {error}.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"Cannot read the table {file}: {error}.") from None
        if "path" in values:
            raise BadInput(f'{file}: unknown key "path": {nearest("path", cls._keys())}')
        return cls.make(values | {"path": file.resolve()}, str(file))

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str = "the table") -> Table:
        """A table from plain values, checked as a whole."""
        try:
            table = cls.model_validate(dict(values))
        except ValidationError as error:
            raise BadInput(f"{where}: " + "; ".join(_problem(e, values) for e in error.errors())) from None
        if problems := _problems(table):
            raise BadInput(f"{where}: " + "; ".join(problems))
        return table

    @classmethod
    def _keys(cls) -> list[str]:
        return [key for key in cls.model_fields if key != "path"]

    def recipe_of(self, setting: Setting, row: Row, more: Mapping[str, Any]) -> Recipe:
        """The recipe of a row in a setting; `more` (seed, device, searched values, ...) is merged last."""
        layers = (self.recipe, setting.recipe, {"method": row.method}, row.recipe, row.at.get(setting.name, {}), more)
        values: dict[str, Any] = {}
        for layer in layers:
            values = merged(values, layer)
        return Recipe.make(values, f'setting "{setting.name}", row "{row.name}"')


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, tables key by key.

    >>> merged({"training": {"lr": 1, "epochs": 2}}, {"training": {"lr": 3}})
    {'training': {'lr': 3, 'epochs': 2}}
    """
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def nested(path: str, value: object) -> dict[str, Any]:
    """A dotted key as nested tables.

    >>> nested("training.lr", 0.1)
    {'training': {'lr': 0.1}}
    """
    first, dot, rest = path.partition(".")
    return {first: nested(rest, value) if dot else value}


def _problem(error: Any, values: Mapping[str, Any]) -> str:  # noqa: ANN401
    """One of pydantic's findings in words, with rows and settings by name."""
    loc = list(error["loc"])
    place, model = "", Table
    if len(loc) > 1 and loc[0] in ("rows", "settings") and isinstance(loc[1], int):
        entry = values[loc[0]][loc[1]]
        name = entry.get("name") if isinstance(entry, Mapping) else None
        place = f"{loc[0][:-1]} " + (f'"{name}"' if name else f"number {loc[1] + 1}") + ": "
        model, loc = (Row if loc[0] == "rows" else Setting), loc[2:]  # type: ignore[assignment]
    elif len(loc) > 1 and loc[0] == "ladder":
        place, model, loc = "ladder: ", Ladder, loc[1:]  # type: ignore[assignment]
    key = ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        known = [k for k in model.model_fields if k != "path"]
        return f'{place}unknown key "{key}": {nearest(str(loc[-1]), known)}'
    if error["type"] == "missing":
        return f'{place}"{key}" is missing'
    if error["type"] == "value_error":
        return f"{place}{key}: {error['ctx']['error']}"
    return f"{place}{key}: {error['msg'][0].lower() + error['msg'][1:]}, got {error['input']!r}"


def _problems(table: Table) -> list[str]:
    """What no single key can be blamed for: names that point nowhere, recipes that cannot be."""
    problems: list[str] = []
    if table.analysis:
        try:
            analysis_named(table.analysis)
        except BadInput as error:
            problems.append(str(error))
    names = {s.name: s for s in table.settings}
    for what, all_of in (("setting", table.settings), ("row", table.rows)):
        slugs = [entry.slug for entry in all_of]  # type: ignore[attr-defined]
        twice = sorted({s for s in slugs if slugs.count(s) > 1})
        problems += [f'two {what}s would share the folder "{s}": give them different names' for s in twice]
    problems += _not_of_a_run(table.recipe, "recipe", "method")
    for setting in table.settings:
        place = f'setting "{setting.name}": '
        problems += [place + p for p in _not_of_a_run(setting.recipe, "recipe", "method")]
        for column, text in setting.columns.items():
            try:
                Selector.read(text)
            except BadInput as error:
                problems.append(f'{place}column "{column}": {error}')
                continue
            if table.selection == "best-val" and text.endswith("@adapted"):
                problems.append(
                    f'{place}column "{column}": adapted models are tested in the last round only: selection'
                )
        named = [("incomparable", c) for c in setting.incomparable]
        named += [("derived", c) for c in setting.derived]
        named += [("ranked", setting.ranked)] if setting.ranked else []
        for key, column in named:
            if column not in setting.columns:
                problems.append(f'{place}{key}: no column "{column}": {nearest(column, setting.columns)}')
    for average, of in table.averages.items():
        place = f'averages: "{average}": '
        problems += [] if len(of) > 1 else [f"{place}an average takes at least two settings, got {len(of)}"]
        for name, column in of.items():
            if name not in names:
                problems.append(f'{place}no setting "{name}": {nearest(name, names)}')
            elif column not in names[name].columns:
                known = nearest(column, names[name].columns)
                problems.append(f'{place}setting "{name}" has no column "{column}": {known}')
    problems += _ladder_problems(table)
    for row in table.rows:
        place = f'row "{row.name}": '
        unknown = [a for a in row.averages if a not in table.averages]
        problems += [f'{place}averages: the table has no "{a}": {nearest(a, table.averages)}' for a in unknown]
        problems += [place + p for p in _not_of_a_run(row.recipe, "recipe", "method")]
        pointers = {"settings": row.settings or [], "at": row.at, "published": row.published}
        for key, pointing in pointers.items():
            for name in pointing:
                if name not in names:
                    problems.append(f'{place}{key}: no setting "{name}": {nearest(name, names)}')
                elif not row.stands_in(names[name]):
                    problems.append(f'{place}{key}: it does not stand in setting "{name}"; add it to its settings')
        for name, over in row.at.items():
            problems += [place + p for p in _not_of_a_run(over, f"at.{name}")]
        if any("federation" in layer for layer in (row.recipe, *row.at.values())):
            problems.append(f'{place}"federation" belongs to a setting, which all its rows share')
        for name, printed in row.published.items():
            columns = names[name].columns if name in names else printed
            problems += [
                f'{place}published.{name}: no column "{c}": {nearest(c, columns)}' for c in printed if c not in columns
            ]
        problems += [f'{place}search: "{key}" has no values' for key, grid in row.search.items() if not grid]
        problems += _recipe_problems(table, row)
    return problems or _empty_columns(table)


def _empty_columns(table: Table) -> list[str]:
    """Columns of a mode in which no row of the setting is tested: nothing would ever stand there."""
    problems = []
    for setting in table.settings:
        recipes = [table.recipe_of(setting, row, {}) for row in table.rows if row.stands_in(setting)]
        for column, selector in setting.selectors.items():
            if selector.mode and not any(may_test(recipe, selector.mode) for recipe in recipes):
                problems.append(f'setting "{setting.name}": column "{column}": {missing_mode(selector.mode)}')
    return problems


def _ladder_problems(table: Table) -> list[str]:
    ladder = table.ladder
    if ladder is None:
        return []
    if bool(ladder.settings) == bool(ladder.rows):
        return ["ladder: expected either settings or rows, each with its step"]
    steps, known = (
        (ladder.settings, [s.name for s in table.settings])
        if ladder.settings
        else (ladder.rows, [row.name for row in table.rows])
    )
    what = "setting" if ladder.settings else "row"
    problems = [f'ladder: no {what} "{name}": {nearest(name, known)}' for name in steps if name not in known]
    problems += [] if len(set(steps.values())) == len(steps) else ["ladder: two of its steps have the same name"]
    on = [s for s in table.settings if s.name in ladder.settings] if ladder.settings else table.settings
    return problems + [
        f'ladder: setting "{s.name}" has no column "{ladder.column}": {nearest(ladder.column, s.columns)}'
        for s in on
        if ladder.column not in s.columns
    ]


def _not_of_a_run(recipe: Mapping[str, Any], key: str, *more: str) -> list[str]:
    found = [k for k in (*_OF_A_RUN, *more) if k in recipe]
    data = recipe.get("data", {})
    found += ["data.root"] if isinstance(data, Mapping) and "root" in data else []
    return [f'{key}: "{k}" is not the table\'s to say: ' + _WHOSE.get(k, "every run has its own") for k in found]


_WHOSE = {"method": "it stands in the rows", "data.root": "it is given on the command line, as --data ROOT"}


def _recipe_problems(table: Table, row: Row) -> list[str]:
    problems: list[str] = []
    for setting in table.settings:
        if not row.stands_in(setting):
            continue
        try:
            table.recipe_of(setting, row, {})
            for key, grid in row.search.items():
                for value in grid:
                    table.recipe_of(setting, row, nested(key, value))
        except BadInput as error:
            problems.append(str(error))
    return problems
