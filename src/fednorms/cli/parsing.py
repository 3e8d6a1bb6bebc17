"""Options from dataclasses: tyro with our conventions, and the recipe's fields as options without a default."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from typing_extensions import override

from fednorms.cli.mistakes import Argument, explain
from fednorms.core.errors import BadInput
from fednorms.core.training import Training
from fednorms.runs.recipe import Data, Recipe

C = TypeVar("C")


Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]  # `--json`, without "(default: False)"
Text = Annotated[str, tyro.conf.arg(help_behavior_hint="")]  # without "(default: '')"
Track = Annotated[list[str], tyro.conf.arg(metavar="TRACKER [TRACKER ...]", help_behavior_hint="")]


@dataclasses.dataclass
class Output:
    """What is printed."""

    quiet: Flag = False
    """Print the result only, no progress."""
    json: Flag = False
    """Print one JSON object and nothing else."""


@dataclasses.dataclass
class SearchOptions:
    """Where a search (`advise`, `tune`) begins, what it writes, and how many runs train at a time."""

    recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A recipe in TOML for everything except the method; options override it."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: one in runs/)")] = None
    """Directory for the answer and all runs."""
    jobs: int = 1
    """Number of runs at a time, each in its own process."""
    output: Output = dataclasses.field(default_factory=Output)

    def read_recipe(self) -> Recipe:
        """The recipe of the file, with the options that were given."""
        return merged(Recipe.read(self.recipe) if self.recipe else Recipe(), self)

    def folder(self, recipe: Recipe, *words: str) -> Path:
        """The directory for the answer: as given, or runs/WORDS-FEDERATION."""
        from fednorms.runs.run_names import slug

        name = recipe.federation.removeprefix("folder:").rstrip("/").rpartition("/")[2]
        return self.out or Path("runs") / "-".join([*words, slug(name)])


# Options of a run that a search decides itself, or does not need.
NOT_OF_SEARCHES = (
    "method",
    "lr",
    "evaluate",
    "evaluate_every",
    "validate_every",
    "patience",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_predictions",
)


def parse(cls: type[C], command: str, args: Sequence[str]) -> C:
    """Read a command's options; a mistake ends with a message and exit code 2."""
    arguments = list(_arguments(cls))
    known = {argument.name: argument.kind for argument in arguments if not argument.by_place}
    valued = {argument.name for argument in arguments if argument.valued}
    asked = [re.sub(r"^--optimiser\b", "--optimizer", arg) for arg in args]  # version 0.1 had the British one
    explain(asked, arguments, command)
    settings = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    printed = _Captured()
    try:
        with contextlib.redirect_stdout(printed):
            return tyro.cli(
                cls,
                prog=f"fednorms {command}",
                args=_switched(asked, known, valued),
                config=settings,
                description=_wrapped(inspect.getdoc(cls) or ""),
            )
    finally:
        print(_folded_usage(printed.getvalue()), end="")


class _Captured(io.StringIO):
    """What tyro prints, with the colors and frames that standard output can show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown_on = sys.stdout

    @override
    def isatty(self) -> bool:
        return self.shown_on.isatty()

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]
        return self.shown_on.encoding


def _folded_usage(text: str) -> str:
    """A help text whose first line, which tyro leaves as long as it is, fits the terminal."""
    usage, newline, rest = text.partition("\n")
    usage = re.sub(r"\x1b\[[0-9;]*m", "", usage)  # colors have no width
    width = shutil.get_terminal_size().columns
    joined = re.sub(r"\[[^\]]*\]", lambda option: option[0].replace(" ", "\0"), usage)  # `[--port INT]` is one word
    folded = textwrap.wrap(joined, width, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)
    return "\n".join(folded).replace("\0", " ") + newline + rest


def _arguments(cls: Any) -> Iterator[Argument]:  # noqa: ANN401
    """The arguments of a command: their names, and the types of their values."""
    docs = {name: doc for kind in reversed(cls.__mro__) for name, doc in _docs_below(kind).items()}
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if dataclasses.is_dataclass(kind):
            yield from _arguments(kind)
            continue
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        named, metavar, about = (
            next((value for extra in extras if (value := getattr(extra, key, None))), "")
            for key in ("name", "metavar", "help")
        )
        by_place = tyro.conf.Positional in extras
        name = metavar or field.name.upper() if by_place else f"--{(named or field.name).replace('_', '-')}"
        required = field.default is field.default_factory is dataclasses.MISSING
        doc = docs.get(field.name, about)
        valued = tyro.conf.FlagConversionOff in extras
        also = next((found for extra in extras if (found := getattr(extra, "aliases", None))), ())
        for called in (name, *also):
            yield Argument(called, _without_none(kind), by_place, required, metavar or "VALUE", doc, valued)


def _docs_below(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class; those of a class that was made while running are in its hints."""
    try:
        return attribute_docs(cls) if dataclasses.is_dataclass(cls) else {}
    except (OSError, TypeError):
        return {}


def _switched(args: Sequence[str], known: Mapping[str, Any], valued: Collection[str]) -> list[str]:
    """Write every switch as tyro reads it: `--json` takes no value, and what may be a recipe's `true` takes one.

    A recipe's switches are given as `--pretrained` or `--no-pretrained`. The form of version 0.1 works for all of them:
    `--pretrained True`.
    """
    written, rest = list[str](), list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*written, arg, *rest]
        name, equals, value = arg.partition("=")
        negated = name.startswith("--no-") and name not in known
        name = f"--{name[5:]}" if negated and known.get(f"--{name[5:]}") is bool else name
        if known.get(name) is not bool:
            written.append(arg)
            continue
        if not equals and rest and rest[0].lower() in _TRUTH:
            value = rest.pop(0)
        if value.lower() not in _TRUTH and (value or equals):
            raise BadInput(f'{name} is a switch: write {name} or --no-{name[2:]}, not {name}="{value}".')
        wanted = _TRUTH.get(value.lower(), True) is not negated
        if name in valued:
            written += [name, str(wanted)]
        elif wanted:
            written.append(name)
    return written


_TRUTH = {"true": True, "false": False}


def _wrapped(doc: str) -> str:
    """A description in lines that fit the terminal; examples, which are indented, stay as they are.

    The lines after a paragraph's first are indented, because tyro joins those that begin with a letter.
    """
    width = shutil.get_terminal_size().columns
    paragraphs = [
        text if re.search(r"^ ", text, re.MULTILINE) else textwrap.fill(text, width, subsequent_indent="  ")
        for text in doc.split("\n\n")
    ]
    return "\n\n".join(paragraphs)


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


@dataclasses.dataclass(frozen=True)
class _Key:
    """A key of the recipe that is an option."""

    section: str  # "training", "data", or "" for the recipe itself
    key: str
    kind: Any
    doc: str
    default: object

    @property
    def path(self) -> str:
        """Where a recipe has it: rounds, or training.lr."""
        return f"{self.section}.{self.key}".lstrip(".")

    def option(self, name: str) -> tuple[str, Any, Any]:
        """A field of a dataclass without a value: an option that was not given keeps the recipe's value."""
        hidden = self.default is False or self.default in (None, "", [])
        default = "" if hidden else f"(default: {_shown(self.default)})"
        metavar = f"| --no-{name.replace('_', '-')}" if self.kind is bool else _METAVARS.get(name)
        shown = tyro.conf.arg(metavar=metavar, help=self.doc, help_behavior_hint=default)
        extras = (shown, tyro.conf.FlagConversionOff) if self.kind is bool else (shown,)
        return name, Annotated[(self.kind | None, *extras)], dataclasses.field(default=None)


def _keys(section: str, cls: type, defaults: object, rename: Mapping[str, str], omit: Iterable[str] = ()) -> _Keys:
    docs, hints = attribute_docs(cls), get_type_hints(cls)
    return {
        rename.get(key, key): _Key(section, key, _without_none(hints[key]), docs.get(key, key), getattr(defaults, key))
        for key in _field_names(cls)
        if key not in omit
    }


_Keys = dict[str, _Key]


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
    if default is True:
        return "yes"
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


_METAVARS = {
    "batch_size": "N",
    "class_weights": "auto|none|balanced|W [W ...]",
    "evaluate": "MODE [MODE ...]",
    "head": "LAYER [LAYER ...]",
    "hold_out": "SITE [SITE ...]",
    "method": "METHOD",
    "federation": "NAME",
    "model": "NAME",
    "optimizer": "sgd|adam|adamw",
    "schedule": "const|exp|step|cosine",
    "normalize": "imagenet|half|none|MEAN/STD",
    "root": "FOLDER",
    "size": "N|HxW",
    "weights": "FILE",
}
_RECORDED = ("training", "data", "version", "fingerprint", "own_parts")  # sections, and what a run records itself
_OF_RECIPE = _keys("", Recipe, Recipe(), {}, omit=_RECORDED)
_OF_TRAINING = _keys("training", Training, Training(), {}, omit=["client_epochs"])
_OF_DATA = _keys("data", Data, Data(), {"seed": "data_seed"})  # --seed is the run's
_KEYS: _Keys = _OF_RECIPE | _OF_TRAINING | _OF_DATA


def _options(name: str, doc: str, keys: Iterable[str]) -> Any:  # noqa: ANN401
    return dataclasses.make_dataclass(name, [_KEYS[key].option(key) for key in keys], namespace={"__doc__": doc})


RecipeOptions: Any = _options("RecipeOptions", "What to train, on which data, and how to test it.", _OF_RECIPE)
TrainingOptions: Any = _options("TrainingOptions", "How a client trains in a round.", _OF_TRAINING)
DataOptions: Any = _options("DataOptions", "How images become sites and splits.", _OF_DATA)
# For commands that have their own --channels.
DataOptionsButChannels: Any = _options(
    "DataOptions", "How images become sites and splits.", [key for key in _OF_DATA if key != "channels"]
)

_COMMON = ("method", "federation", "model", "rounds", "lr", "epochs", "batch_size", "seed", "device")
# Headings of the other options in a long help: title, what it is about, and options.
_PANELS = {
    "training": (
        "How a client trains in a round.",
        (
            "optimizer",
            "momentum",
            "weight_decay",
            "schedule",
            "decay",
            "warmup",
            "steps",
            "clip",
            "last",
            "keep_momentum",
        ),
    ),
    "federation": (
        "Who takes part, and how models are averaged.",
        ("participation", "weighting", "on_divergence"),
    ),
    "model and loss": (
        "Where the model starts, and what it minimizes.",
        ("pretrained", "weights", "head", "loss", "class_weights"),
    ),
    "data": ("How images become sites and splits.", tuple(_OF_DATA)),
    "testing": ("What is tested, and when.", ("evaluate", "evaluate_every", "validate_every", "patience", "metric")),
    "speed and storage": (
        "Where and how fast it runs, and what is kept.",
        (
            *("engine", "workers", "threads", "memory", "precision", "deterministic"),
            *("checkpoint_every", "keep_checkpoints", "keep_predictions", "state_limit_mb"),
        ),
    ),
}
_PLACED = {*_COMMON, *(key for _, keys in _PANELS.values() for key in keys)}


def recipe_options(name: str, without: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """A base class with all options of a recipe: the common ones, then the others under their headings."""
    panels = {title: (doc, [k for k in keys if k not in without]) for title, (doc, keys) in _PANELS.items()}
    if more := [key for key in _KEYS if key not in _PLACED]:
        panels["more"] = ("Other settings.", more)
    fields: list[tuple[str, Any, Any]] = [_KEYS[key].option(key) for key in _COMMON if key not in without]
    for title, (doc, keys) in panels.items():
        word = title.replace(" ", "_")
        made = _options(f"{name}_{word}", doc, keys)
        fields.append(
            (f"{word}_panel", Annotated[made, tyro.conf.arg(name=title)], dataclasses.field(default_factory=made))
        )
    return dataclasses.make_dataclass(name, fields)


def merged(base: Recipe, *options: object) -> Recipe:
    """`base` with the given options in place of its own values.

    >>> merged(Recipe(rounds=7), RecipeOptions(seed=3), TrainingOptions(lr=0.5), DataOptions()).training.lr
    0.5
    """
    values = base.model_dump()
    values["training"] = dict(vars(base.training))
    given = {name: value for one in options for name, value in _given(one)}
    for name, value in given.items():
        key = _KEYS[name]
        (values[key.section] if key.section else values)[key.key] = value
    if "federation" in given or any(_KEYS[name].section == "data" for name in given):
        values["fingerprint"] = ""  # the data may differ from those of the recipe's run
    return Recipe.make(values)


def _given(options: object) -> Iterator[tuple[str, Any]]:
    for name, value in vars(options).items():
        if dataclasses.is_dataclass(value):
            yield from _given(value)
        elif name in _KEYS and value is not None:
            yield name, value
