"""Options from dataclasses: tyro with our conventions, and the recipe's fields as options without a default."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from fednorms.core.training import Training
from fednorms.runs.recipe import Data, Recipe

C = TypeVar("C")


@dataclasses.dataclass
class Output:
    """What is printed."""

    quiet: bool = False
    """Print the result only, no progress."""
    json: bool = False
    """Print one JSON object and nothing else."""


def parse(cls: type[C], command: str, args: Sequence[str]) -> C:
    """Read a command's options; a mistake ends with a message and exit code 2."""
    settings = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    american = [re.sub(r"^--optimiser\b", "--optimizer", arg) for arg in args]  # version 0.1 had the British one
    return tyro.cli(cls, prog=f"fednorms {command}", args=american, config=settings)


def attribute_docs(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class.

    >>> attribute_docs(Output)["quiet"]
    'Print the result only, no progress.'
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def _options(
    name: str, doc: str, cls: type, defaults: object, omit: Sequence[str] = (), rename: Mapping[str, str] | None = None
) -> type:
    """A dataclass with the fields of `cls`, all None: options that were not given keep the recipe's values."""
    docs, hints = attribute_docs(cls), get_type_hints(cls)
    fields: list[tuple[str, Any, Any]] = []
    for field in _field_names(cls):
        if field in omit:
            continue
        default, kind = getattr(defaults, field), _without_none(hints[field])
        option = tyro.conf.arg(
            name=(rename or {}).get(field),
            metavar=_METAVARS.get(field),
            help=docs.get(field, field),
            help_behavior_hint="" if default in (None, "", []) else f"(default: {_shown(default)})",
        )
        # True and False are written out: an option can set a recipe's `true` back to false.
        flags = (option, tyro.conf.FlagConversionOff) if kind is bool else (option,)
        fields.append((field, Annotated[(kind | None, *flags)], dataclasses.field(default=None)))  # type: ignore[valid-type]
    return dataclasses.make_dataclass(name, fields, namespace={"__doc__": doc})


def _field_names(cls: type) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [f.name for f in dataclasses.fields(cls)]
    return list(cls.model_fields)  # type: ignore[attr-defined]


def _without_none(hint: Any) -> Any:  # noqa: ANN401
    if get_origin(hint) in (Union, types.UnionType):
        kinds = tuple(k for k in get_args(hint) if k is not type(None))
        return Union[kinds]  # noqa: UP007
    return hint


def _shown(default: object) -> str:
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


_METAVARS = {
    "class_weights": "auto|none|balanced|W [W ...]",
    "head": "LAYER [LAYER ...]",
    "evaluate": "MODE [MODE ...]",
    "hold_out": "SITE [SITE ...]",
    "weights": "FILE",
}
_NOT_OPTIONS = ("training", "data", "version", "fingerprint", "own_parts")
_WHAT = "What to train, on which data, and how to test it."

RecipeOptions: Any = _options("RecipeOptions", _WHAT, Recipe, Recipe(), omit=_NOT_OPTIONS)
CompareOptions: Any = _options(
    "CompareOptions", _WHAT, Recipe, Recipe(threads=1), omit=(*_NOT_OPTIONS, "method", "seed")
)
TrainingOptions: Any = _options("TrainingOptions", "How a client trains in a round.", Training, Training())
DataOptions: Any = _options(
    "DataOptions",
    "How images become sites and splits.",
    Data,
    Data(),
    rename={"seed": "data-seed"},  # --seed is the run's
)


def merged(base: Recipe, options: object, training: object, data: object) -> Recipe:
    """`base` with the given options in place of its own values.

    >>> merged(Recipe(rounds=7), RecipeOptions(seed=3), TrainingOptions(lr=0.5), DataOptions()).training.lr
    0.5
    """
    values = base.model_dump() | _given(options)
    values["training"] = vars(base.training) | _given(training)
    values["data"] = base.data.model_dump() | _given(data)
    if _given(data) or getattr(options, "federation", None):
        values["fingerprint"] = ""  # the data may differ from those of the recipe's run
    return Recipe.make(values, "the options")


def _given(options: object) -> dict[str, Any]:
    return {k: v for k, v in vars(options).items() if v is not None}
