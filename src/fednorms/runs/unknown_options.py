"""Errors for keywords that `run`, `compare` and `resume` do not have: the nearest option, or where a setting goes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.core.part import REGISTRY
from fednorms.core.training import Training
from fednorms.methods.registry import load_all
from fednorms.runs.option_names import ELSEWHERE
from fednorms.runs.recipe import Data, Recipe


def refuse_unknown(function: Callable[..., object], unknown: Mapping[str, object], *methods: object) -> None:
    """Raise BadInput for keywords that a function does not have; `methods` are those that were asked for."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if unknown:
        who = f"fednorms.{function.__name__}"
        asked = " ".join(str(m) for m in methods if m is not None)
        raise BadInput(" ".join(_answer(who, known, key, value, asked) for key, value in unknown.items()))


def _answer(who: str, known: list[str], key: str, value: object, method: str) -> str:
    shown = repr(value)
    if ELSEWHERE.get(key) in known:
        return f"{who} has no {key}=. It is called {ELSEWHERE[key]}=."
    if key == "seeds":
        return (
            f"{who} trains with one seed (seed=0). For several, use "
            f'fednorms.compare(["{method or "fedavg"}"], ..., seeds={shown}).'
        )
    if key == "patience" and "stop" in known:
        return f"{who} has no patience=. Write stop=fednorms.EarlyStopping(patience={shown})."
    if "recipe" in known:  # what a recipe holds
        if key in {f.name for f in fields(Training)} and "training" in known:
            return f"{who} has no {key}=. It is a setting of local training: training=fednorms.Training({key}={shown})."
        if having := _having(key, method):
            others = f" (also of {', '.join(having[1:])})" if having[1:] else ""
            return (
                f"{key}= is not an option of {who}, but of the method {having[0]}{others}. "
                f'Write it into the method: method="{having[0]}({key}={shown})".'
            )
        if key in Recipe.model_fields:
            return f"{who} has no {key}=. It is a key of the recipe: recipe=fednorms.Recipe({key}={shown})."
        if key in Data.model_fields:
            return (
                f"{who} has no {key}=. It is a setting of the data: pass fednorms.federation(..., {key}=...), or "
                f'recipe=fednorms.Recipe(data={{"{key}": {shown}}}).'
            )
    return f"{who} has no {key}=: {nearest(key, known)}."


def _having(key: str, method: str) -> list[str]:
    """The methods that have an option; first those that were asked for."""
    load_all()
    asked = set(re.findall(r"[a-z]\w*", method))
    found = [name for name, part in REGISTRY.items() if key in inspect.signature(part).parameters]
    return sorted(found, key=lambda name: (name not in asked, name != "fedprox", name))
