"""The pages of the API: every public name of fednorms, by theme. mkdocstrings fills them when the site is built."""

from __future__ import annotations

import fednorms
from fednorms.flower import __all__ as apps

# The pages in the order of the menu, with the packages and modules whose public names they show. The longest match
# counts; a name that none matches is on the last page.
THEMES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "training": (
        "Train and compare",
        "Train one method, or compare several.",
        ("runs", "reports", "core.training", "engines"),
    ),
    "advice": ("Choose a method", "Find out which method to take, and tune one.", ("advice",)),
    "federations": ("Federations", "Open data as a federation of sites, and divide them.", ("data", "transforms")),
    "models": (
        "Use a trained model",
        "Test, export, adapt and apply what a run has trained.",
        ("runs.use", "models", "evaluation"),
    ),
    "methods": ("Methods", "Read methods, define parts, and see what a method does.", ("core", "methods", "explain")),
    "parts": ("Every part", "The parts that fednorms has, with their formulas, papers and options.", ()),
    "layers": ("Layers", "The layers that methods put into a model, and your own.", ("layers", "core.norms")),
    "papers": ("Published tables", "Repeat a paper's table, or the measurement behind a figure.", ("papers",)),
    "flower": ("Flower apps", "The two apps of a [deployment across machines](../../flower.md).", ("flower",)),
    "errors": ("Errors and version", "The errors that fednorms raises on purpose.", ("core.errors",)),
}
LAST = "errors"
HOOKS = """\
# Hooks

A part implements some of these hooks. [Architecture](../architecture.md#hooks-and-how-they-combine) has one table of
all hooks and the rule by which each combines. [Add a method](../add-a-method.md) is a worked example.

::: fednorms.Part

## What hooks see

::: fednorms.core.views
    options:
      heading_level: 3
      show_root_heading: false
      show_root_toc_entry: false
"""


def theme(name: str) -> str:
    """The page on which a public name is.

    >>> theme("run"), theme("open_run"), theme("Diverged"), theme("layers")
    ('training', 'models', 'errors', 'layers')
    """
    value = getattr(fednorms, name)
    home = getattr(value, "__module__", getattr(value, "__name__", "")).removeprefix("fednorms.")
    fitting = [
        (len(m), key) for key, (*_, modules) in THEMES.items() for m in modules if f"{home}.".startswith(m + ".")
    ]
    return max(fitting)[1] if fitting else LAST


def pages() -> dict[str, str]:
    r"""Path and text of every page.

    >>> "::: fednorms.run\n" in pages()["reference/api/training.md"]
    True
    """
    shown: dict[str, list[str]] = {key: [] for key in THEMES}
    for name in sorted(fednorms.__all__, key=lambda name: (name[:1].isupper(), name.lower())):
        if name not in ("Part", "layers", "methods"):
            shown[theme(name)].append(f"::: fednorms.{name}")
    shown["methods"].insert(0, "[`Part`](../hooks.md) is on the page of hooks, its subclasses on [another](parts.md).")
    shown["methods"].append(_module("methods"))
    shown["parts"] += [f"::: {cls.__module__}.{cls.__name__}" for cls in _parts()]
    shown["layers"] += [_module("layers"), *(f"::: fednorms.layers.{name}" for name in fednorms.layers.__all__)]
    shown["flower"] += [f"::: fednorms.flower.{name}" for name in apps]
    made = {"reference/hooks.md": HOOKS}
    for key, (title, what, _) in THEMES.items():
        made[f"reference/api/{key}.md"] = "\n\n".join([f"# {title}", what, *shown[key]]) + "\n"
    return made


def menu() -> list[dict[str, str]]:
    """The entries of the menu."""
    return [{title: f"reference/api/{key}.md"} for key, (title, *_) in THEMES.items()]


def _parts() -> list[type[fednorms.Part]]:
    return [getattr(fednorms.methods, name) for name in sorted(fednorms.methods.__all__, key=str.lower)]


def _module(name: str) -> str:
    return f"::: fednorms.{name}\n    options:\n      members: false"
