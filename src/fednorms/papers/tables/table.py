"""A published table or figure as a file: protocol, rows, columns, published values, tolerance and known deviations."""

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
from fednorms.papers.tables.explanations import Explanation, explanations_in, notes_in
from fednorms.papers.tables.selectors import Selector
from fednorms.papers.tables.validation import problems
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import slug

FILE = "table.toml"


class Published(NamedTuple):
    """A published value in the table's unit; `std` where the paper gives one. Failed training is minus infinity."""

    mean: float
    std: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the paper reports that training failed."""
        return self.mean == -math.inf


def _published(value: object) -> object:
    if value == "failed":
        return Published(-math.inf)
    numbers = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= 2 or not all(type(n) in (int, float) for n in numbers):
        raise ValueError(f'expected a number, [mean, std] or "failed", got {value!r}')
    return Published(*map(float, numbers))


class Reason(NamedTuple):
    """Why a column is not judged; `when` limits that to data of one layout (as named by `fednorms data check`)."""

    why: str
    when: str = ""


def _reason(value: object) -> object:
    if isinstance(value, str):
        return Reason(value)
    if isinstance(value, dict) and set(value) <= {"why", "when"} and "why" in value:
        return Reason(**{k: str(v) for k, v in value.items()})
    raise ValueError(f'expected a reason, as text, or {{ why = "...", when = "a layout" }}, got {value!r}')


_FORBID = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Setting(BaseModel):
    """One data set, division or batch size, in which every row of the table is one recipe."""

    model_config = _FORBID

    name: str = Field(min_length=1)
    """Short name, used for folders and in rows."""
    title: str = ""
    """The heading of its table (default: the name)."""
    recipe: dict[str, Any] = {}
    """Merged over the table's recipe."""
    columns: dict[str, str] = Field(min_length=1)
    """Column to selector, as "Avg" to "mean"."""
    incomparable: dict[str, Annotated[Reason, BeforeValidator(_reason)]] = {}
    """Columns that are shown and never judged, and why."""
    store: list[Literal["curve", "model", "rounds"]] = []
    """What is kept of every run: accuracy by round, its directory, or all checkpoints in it, too."""
    derived: list[str] = []
    """Columns whose published values were computed from other columns: judged, but not counted."""
    counts: bool = True
    """False for another reading of the protocol with the same published values: judged, but not counted."""
    split_per_seed: bool = False
    """Seed k also draws the split k, for data without official lists: results then include how much splits differ."""
    ranked: str = ""
    """The column by which rows are ranked, the best first (default: the order of the file)."""

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
    """One method, and what the paper published for it."""

    model_config = _FORBID

    name: str = Field(min_length=1)
    """Its name in the paper."""
    method: str
    """Parts joined by +, as in a recipe."""
    settings: list[str] | None = None
    """The settings in which it has runs (default: all)."""
    recipe: dict[str, Any] = {}
    """Merged over the setting's recipe."""
    at: dict[str, dict[str, Any]] = {}
    """Per setting: merged last; may also name another `method`."""
    published: dict[str, dict[str, Annotated[Published, BeforeValidator(_published)]]] = {}
    """Published values, per setting and column."""
    counts: bool = True
    """False for a row that the paper does not have, or that is not a target: judged, but not counted."""
    averages: dict[str, Annotated[Published, BeforeValidator(_published)]] = {}
    """Published averages over settings, by their names in the table."""
    search: dict[str, list[Any]] = {}
    """Values to try on validation images, per key of the recipe; the best one is used."""

    @property
    def slug(self) -> str:
        """The name as a folder."""
        return slug(self.name)

    def runs_in(self, setting: Setting) -> bool:
        """Whether the row has runs in a setting."""
        return self.settings is None or setting.name in self.settings


class Axis(BaseModel):
    """The axis of a figure: settings, or rows, that step through one quantity."""

    model_config = _FORBID

    label: str = Field(min_length=1)
    """The quantity, as "clients"."""
    column: str
    """The column that is drawn over it."""
    settings: dict[str, str] = {}
    """The step of each setting, as "clients-5" to "5"; every row is a line."""
    rows: dict[str, str] = {}
    """The step of each row; every setting is a line."""


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
    """FedNN, GReg, FedWon, FedFN, or fednorms for tables that no paper has."""
    label: str
    """Its label in the paper: "Table 1"."""
    title: str
    """What it shows."""
    kind: Literal["table", "figure"] = "table"
    analysis: str = ""
    """The analysis that a figure shows; its accuracies are then listed and not judged."""
    tolerance: float = Field(default=3.0, ge=0)
    """Points by which a result may be worse than published; better is never a miss."""
    seeds: int = Field(default=3, ge=1)
    """How many seeds, from 0."""
    search_seeds: int = Field(default=1, ge=1)
    """How many seeds, from 0, try every value of a search. It does not depend on `seeds`, so the choice stays the same
    however many runs the row has."""
    selection: Literal["last", "best-val"] = "last"
    """Which round is reported."""
    notes: list[str] = []
    """Known deviations and choices; may also be a list in a Markdown file of the same name."""
    recipe: dict[str, Any] = {}
    """Keys of a recipe that all runs share."""
    settings: list[Setting] = Field(min_length=1)
    rows: list[Row] = Field(min_length=1)
    averages: dict[str, dict[str, str]] = {}
    """Published averages over settings: the column that is averaged, per name and setting."""
    ladder: Axis | None = None
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
    def explanations(self) -> list[Explanation]:
        """What explains its differences from the paper; see the Markdown file of the same name."""
        return [] if self.path is None else explanations_in(self.path.with_suffix(".md"))

    @property
    def has_published(self) -> bool:
        """Whether the table has published values; custom tables may have none."""
        return any(values for row in self.rows for values in (*row.published.values(), row.averages))

    @classmethod
    def read(cls, file: Path) -> Table:
        """Read a table's file; every problem is reported at once."""
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            notes = notes_in(file.with_suffix(".md"))
        except tomllib.TOMLDecodeError as error:
            raise BadInput(f"{file} is not valid TOML: {error}.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"Cannot read the table {file}: {error}.") from None
        if "path" in values:
            raise BadInput(f'{file}: unknown key "path": {nearest("path", cls._keys())}')
        if notes and isinstance(values.setdefault("notes", []), list):
            values["notes"] += notes
        return cls.make(values | {"path": file.resolve()}, str(file))

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str = "the table") -> Table:
        """A table from plain values, checked as a whole."""
        try:
            table = cls.model_validate(dict(values))
        except ValidationError as error:
            raise BadInput(f"{where}: " + "; ".join(_problem(e, values) for e in error.errors())) from None
        if found := problems(table):
            raise BadInput(f"{where}: " + "; ".join(found))
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

    def searched_recipe(self, setting: Setting, row: Row, point: Mapping[str, Any]) -> Recipe:
        """The recipe of a row in a setting with the values of a search, by dotted key."""
        return self.recipe_of(setting, row, as_recipe(point))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, nested tables key by key.

    >>> merged({"training": {"lr": 1, "epochs": 2}}, {"training": {"lr": 3}})
    {'training': {'lr': 3, 'epochs': 2}}
    """
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def nested(path: str, value: object) -> dict[str, Any]:
    """Turn a dotted key into nested tables.

    >>> nested("training.lr", 0.1)
    {'training': {'lr': 0.1}}
    """
    first, dot, rest = path.partition(".")
    return {first: nested(rest, value) if dot else value}


def as_recipe(point: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of a search into keys of a recipe.

    >>> as_recipe({"training.lr": 0.1, "rounds": 3})
    {'training': {'lr': 0.1}, 'rounds': 3}
    """
    values: dict[str, Any] = {}
    for key, value in point.items():
        values = merged(values, nested(key, value))
    return values


def _problem(error: Any, values: Mapping[str, Any]) -> str:  # noqa: ANN401
    """An error of pydantic in words, with rows and settings by name."""
    loc = list(error["loc"])
    place, model = "", Table
    if len(loc) > 1 and loc[0] in ("rows", "settings") and isinstance(loc[1], int):
        entry = values[loc[0]][loc[1]]
        name = entry.get("name") if isinstance(entry, Mapping) else None
        place = f"{loc[0][:-1]} " + (f'"{name}"' if name else f"number {loc[1] + 1}") + ": "
        model, loc = (Row if loc[0] == "rows" else Setting), loc[2:]  # type: ignore[assignment]
    elif len(loc) > 1 and loc[0] == "ladder":
        place, model, loc = "ladder: ", Axis, loc[1:]  # type: ignore[assignment]
    key = ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        known = [k for k in model.model_fields if k != "path"]
        return f'{place}unknown key "{key}": {nearest(str(loc[-1]), known)}'
    if error["type"] == "missing":
        return f'{place}"{key}" is missing'
    if error["type"] == "value_error":
        return f"{place}{key}: {error['ctx']['error']}"
    return f"{place}{key}: {error['msg'][0].lower() + error['msg'][1:]}, got {error['input']!r}"
