"""Check a table: whether a column can have a number, as far as recipes tell."""

from __future__ import annotations

from fednorms.evaluation.modes import Mode
from fednorms.methods.registry import method as read_method
from fednorms.runs.recipe import Recipe


def may_test(recipe: Recipe, text: str) -> bool:
    """Whether a run of this recipe may be tested in a mode; what model and data decide counts as possible.

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


def missing_mode(text: str) -> str:
    """What a table is told whose rows are never tested in a mode that a column shows."""
    if Mode.read(text).model == "adapted":
        return f'no row is tested as "{text}": add "+ finetune" to a method that is to be fine-tuned'
    return f'no row is tested as "{text}": add it, as in recipe.evaluate = ["auto", "{text}"]'
