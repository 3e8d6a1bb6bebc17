"""Code of other packages and of the user: entry points, and modules that a setting names.

A package adds methods, models or federations with entry points in its pyproject.toml:

    [project.entry-points."fednorms.methods"]
    mine = "mypackage.parts"                     # importing it registers its parts, which have @fn.part("name")
    [project.entry-points."fednorms.models"]
    mynet = "mypackage.nets:MyNet"               # MyNet(classes, channels, size), used as model="mynet"
    [project.entry-points."fednorms.federations"]
    wards = "mypackage.data:wards"               # wards(size, seed, ...) returns a Federation
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal

from fednorms.core.errors import BadInput

Group = Literal["methods", "models", "federations"]
_asked_for: set[EntryPoint] = set()  # methods' entry points that were imported, or could not be


@dataclass(frozen=True)
class Plugin:
    """An entry point of another package."""

    name: str
    package: str
    entry: EntryPoint

    def load(self) -> Any:  # noqa: ANN401
        """Import it."""
        try:
            return self.entry.load()
        except Exception as error:
            raise BadInput(
                f'The package {self.package} declares "{self.name}" ({self.entry.group}), which cannot be imported: '
                f"{type(error).__name__}: {error}. Repair or uninstall the package."
            ) from error


def found(group: Group) -> dict[str, Plugin]:
    """The entry points of a group by name; nothing is imported.

    >>> isinstance(found("models"), dict)
    True
    """
    return dict(_found(group, tuple(sys.path)))


@lru_cache
def _found(group: Group, path: tuple[str, ...]) -> dict[str, Plugin]:
    every: dict[str, Plugin] = {}
    for entry in entry_points(group=f"fednorms.{group}"):
        every.setdefault(entry.name, Plugin(entry.name, entry.dist.name if entry.dist else "?", entry))
    return every


def custom_methods() -> list[str]:
    """What to import for the methods that are not ours: modules in FEDNORMS_METHODS, and packages."""
    return os.environ.get("FEDNORMS_METHODS", "").split() + [p.package for p in found("methods").values()]


def load_methods() -> None:
    """Import what `custom_methods` lists; its parts register themselves.

    A module that FEDNORMS_METHODS names must be there. A broken package is a warning: other methods still work.
    """
    for module in os.environ.get("FEDNORMS_METHODS", "").split():
        import_named(module, "FEDNORMS_METHODS names")
    for plugin in found("methods").values():
        if plugin.entry not in _asked_for:
            _asked_for.add(plugin.entry)  # before the import, which may itself ask for a method
            try:
                plugin.load()
            except BadInput as error:
                warnings.warn(str(error), stacklevel=2)


def import_named(module: str, who: str) -> ModuleType:
    """Import a module of the user's, which may be in the working directory; `who` starts the error message.

    >>> import_named("no_such_module", "Here is")
    Traceback (most recent call last):
    fednorms.BadInput: Here is the module "no_such_module", which cannot be imported: No module named 'no_such_module'.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return import_module(module)
    except (ImportError, SyntaxError, ValueError) as error:
        hint = " Give the module's name, without .py." if module.endswith(".py") else ""
        raise BadInput(f'{who} the module "{module}", which cannot be imported: {error}.{hint}') from None


def called_with(make: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any] | str:
    """The values among `given` that a function takes, by name; or the name of a parameter that it needs and lacks.

    >>> called_with(lambda classes, width=8: None, {"classes": 10, "size": 28})
    {'classes': 10}
    >>> called_with(lambda depth: None, {"classes": 10})
    'depth'
    """
    from inspect import Parameter, signature

    parameters = signature(make).parameters.values()
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return given
    named = [p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is Parameter.empty and p.name not in given]
    return missing[0] if missing else {p.name: given[p.name] for p in named if p.name in given}
