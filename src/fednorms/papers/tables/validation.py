"""Check a table as a whole: names that exist, keys in their place, valid recipes, columns that get a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.evaluation.modes import Mode
from fednorms.methods.registry import method as read_method
from fednorms.papers.analysis.measures import analysis_named
from fednorms.papers.tables.selectors import Selector
from fednorms.runs.recipe import Recipe

if TYPE_CHECKING:
    from fednorms.papers.tables.table import Row, Setting, Table

_OF_A_RUN = ("seed", "device", "engine", "version", "fingerprint")
_WHERE_INSTEAD = {"method": "give it in the rows", "data.root": "give it on the command line, as --data ROOT"}

Problems = Iterator[str]


def problems(table: Table) -> list[str]:
    """Everything that is wrong with a table whose keys are valid one by one."""
    steps = (_analysis, _shared_folders, _shared_recipe, _settings, _averages, _ladder, _rows)
    found = [problem for step in steps for problem in step(table)]
    return found or list(_columns_never_tested(table))  # which needs valid recipes


def _analysis(table: Table) -> Problems:
    if table.analysis:
        yield from _refused(lambda: analysis_named(table.analysis))


def _shared_folders(table: Table) -> Problems:
    for what, slugs in (("settings", [s.slug for s in table.settings]), ("rows", [r.slug for r in table.rows])):
        for name in sorted({s for s in slugs if slugs.count(s) > 1}):
            yield f'two {what} would share the folder "{name}": give them different names'


def _shared_recipe(table: Table) -> Problems:
    yield from _misplaced_keys(table.recipe, "recipe", "method")


# -- settings -----------------------------------------------------------------------------------------------------
def _settings(table: Table) -> Problems:
    for setting in table.settings:
        for step in (_setting_recipe, _setting_columns, _setting_references):
            yield from (f'setting "{setting.name}": {problem}' for problem in step(table, setting))


def _setting_recipe(table: Table, setting: Setting) -> Problems:
    yield from _misplaced_keys(setting.recipe, "recipe", "method")


def _setting_columns(table: Table, setting: Setting) -> Problems:
    for column, text in setting.columns.items():
        wrong = list(_refused(lambda text=text: Selector.read(text)))  # type: ignore[misc]
        if not wrong and table.selection == "best-val" and text.endswith("@adapted"):
            wrong = ['adapted models are tested only in the last round: use selection = "last"']
        yield from (f'column "{column}": {problem}' for problem in wrong)


def _setting_references(table: Table, setting: Setting) -> Problems:
    """Columns that other keys of the setting name."""
    named = [("incomparable", c) for c in setting.incomparable]
    named += [("derived", c) for c in setting.derived]
    named += [("ranked", setting.ranked)] if setting.ranked else []
    for key, column in named:
        if column not in setting.columns:
            yield f'{key}: no column "{column}": {nearest(column, setting.columns)}'


# -- averages and the axis of a figure ----------------------------------------------------------------------------
def _averages(table: Table) -> Problems:
    settings = {s.name: s for s in table.settings}
    for average, averaged in table.averages.items():
        place = f'averages: "{average}": '
        if len(averaged) < 2:
            yield f"{place}an average takes at least two settings, got {len(averaged)}"
        for name, column in averaged.items():
            if name not in settings:
                yield f'{place}no setting "{name}": {nearest(name, settings)}'
            elif column not in settings[name].columns:
                yield f'{place}setting "{name}" has no column "{column}": {nearest(column, settings[name].columns)}'


def _ladder(table: Table) -> Problems:
    axis = table.ladder
    if axis is None:
        return
    if bool(axis.settings) == bool(axis.rows):
        yield "ladder: expected either settings or rows, each with its step"
        return
    if axis.settings:
        what, steps, known = "setting", axis.settings, [s.name for s in table.settings]
        drawn = [s for s in table.settings if s.name in axis.settings]
    else:
        what, steps, known, drawn = "row", axis.rows, [row.name for row in table.rows], table.settings
    for name in steps:
        if name not in known:
            yield f'ladder: no {what} "{name}": {nearest(name, known)}'
    if len(set(steps.values())) < len(steps):
        yield "ladder: two of its steps have the same name"
    for setting in drawn:
        if axis.column not in setting.columns:
            known_columns = nearest(axis.column, setting.columns)
            yield f'ladder: setting "{setting.name}" has no column "{axis.column}": {known_columns}'


# -- rows ---------------------------------------------------------------------------------------------------------
def _rows(table: Table) -> Problems:
    for row in table.rows:
        for step in (_row_averages, _row_keys, _row_settings, _row_columns, _row_search):
            yield from (f'row "{row.name}": {problem}' for problem in step(table, row))
        yield from _row_recipes(table, row)


def _row_averages(table: Table, row: Row) -> Problems:
    for name in row.averages:
        if name not in table.averages:
            yield f'averages: the table has no "{name}": {nearest(name, table.averages)}'


def _row_keys(table: Table, row: Row) -> Problems:
    yield from _misplaced_keys(row.recipe, "recipe", "method")
    for name, over in row.at.items():
        yield from _misplaced_keys(over, f"at.{name}")
    if any("federation" in layer for layer in (row.recipe, *row.at.values())):
        yield '"federation" belongs to a setting, because all rows of a setting share it'


def _row_settings(table: Table, row: Row) -> Problems:
    settings = {s.name: s for s in table.settings}
    for key, names in {"settings": row.settings or [], "at": row.at, "published": row.published}.items():
        for name in names:
            if name not in settings:
                yield f'{key}: no setting "{name}": {nearest(name, settings)}'
            elif not row.runs_in(settings[name]):
                yield f'{key}: the row is not part of setting "{name}"; add "{name}" to its settings'


def _row_columns(table: Table, row: Row) -> Problems:
    settings = {s.name: s for s in table.settings}
    for name, published in row.published.items():
        columns = settings[name].columns if name in settings else published
        for column in published:
            if column not in columns:
                yield f'published.{name}: no column "{column}": {nearest(column, columns)}'


def _row_search(table: Table, row: Row) -> Problems:
    for key, grid in row.search.items():
        if not grid:
            yield f'search: "{key}" has no values'


def _row_recipes(table: Table, row: Row) -> Problems:
    """Recipes that cannot be, also with any value of a search; the messages name row and setting themselves."""
    points = [{}, *({key: value} for key, grid in row.search.items() for value in grid)]
    for setting in table.settings:
        if row.runs_in(setting):
            wrong = (_refused(lambda s=setting, p=p: table.searched_recipe(s, row, p)) for p in points)  # type: ignore[misc]
            yield from next((found for refusal in wrong if (found := list(refusal))), [])


# -- help ---------------------------------------------------------------------------------------------------------
def _refused(attempt: Any) -> Problems:  # noqa: ANN401
    """The message of the BadInput that a function raises, if it does."""
    try:
        attempt()
    except BadInput as error:
        yield str(error)


def _misplaced_keys(recipe: Mapping[str, Any], place: str, *more: str) -> Problems:
    """Keys of a recipe that a table does not decide."""
    found = [key for key in (*_OF_A_RUN, *more) if key in recipe]
    data = recipe.get("data", {})
    found += ["data.root"] if isinstance(data, Mapping) and "root" in data else []
    for key in found:
        yield f'{place}: "{key}" cannot be set in a table: {_WHERE_INSTEAD.get(key, "every run has its own")}'


# -- columns that get a number ------------------------------------------------------------------------------------
def _columns_never_tested(table: Table) -> Problems:
    """Columns of a mode in which no row of the setting is tested."""
    for setting in table.settings:
        recipes = [table.recipe_of(setting, row, {}) for row in table.rows if row.runs_in(setting)]
        for column, selector in setting.selectors.items():
            if selector.mode and not any(may_test(recipe, selector.mode) for recipe in recipes):
                yield f'setting "{setting.name}": column "{column}": {_missing_mode(selector.mode)}'


def may_test(recipe: Recipe, text: str) -> bool:
    """Whether a run of this recipe may be tested in a mode; what depends on model and data counts as possible.

    >>> may_test(Recipe(), "personal"), may_test(Recipe(), "after_local"), may_test(Recipe(), "adapted")
    (True, False, False)
    >>> may_test(Recipe(evaluate=["global", "global/batch:32"]), "global/batch:32")
    True
    """
    wanted = Mode.read(text)
    return any(_gives(recipe, asked, wanted) for asked in recipe.evaluate)


def _gives(recipe: Recipe, asked: str, wanted: Mode) -> bool:
    rules = read_method(recipe.method).evaluation()
    if asked == "auto":
        models = {"global", "personal", "unseen"} | ({"adapted"} if rules.phases else set())
        mode = Mode(wanted.model) if wanted.model in models else None
    else:
        mode = Mode.read(asked)
    if mode is None or mode.model != wanted.model:
        return False
    by_itself = {"auto", "global", "own", rules.statistics, rules.unseen}
    return wanted.statistics in ({"auto", mode.statistics} if mode.statistics != "auto" else by_itself)


def _missing_mode(text: str) -> str:
    if Mode.read(text).model == "adapted":
        return f'no row is tested as "{text}": add "+ finetune" to a method that is to be fine-tuned'
    return f'no row is tested as "{text}": add it, as in recipe.evaluate = ["auto", "{text}"]'
