"""`fednorms list`: methods, models, federations, partitions, transforms and analyses."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from fednorms.cli.index import Rows, index
from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core import plugins
from fednorms.core.errors import BadInput
from fednorms.core.options import nearest


@dataclass
class List:
    """List all methods, models, federations, partition rules, transform chains or analyses.

    For example:
      fednorms list methods
      fednorms list methods prox
      fednorms list methods --paper fedwon
      fednorms list methods "fed*" --costs
    """

    what: tyro.conf.Positional[Literal["methods", "models", "federations", "partitions", "transforms", "analyses"]]
    """What to list."""
    pattern: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[PATTERN]", help_behavior_hint="")] = ""
    """Only rows that contain this text; with * or ?, rows whose name matches: "fed*"."""
    paper: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """Only methods in the tables of this paper, such as fedwon."""
    ideas: Flag = False
    """Show the idea and the paper of every method, not only names; a pattern does so for the rows that it chooses."""
    costs: Flag = False
    """Show what methods cost and where they work, instead of their ideas."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def list_(args: Sequence[str]) -> int:
    """The command."""
    given = parse(List, "list", args)
    if given.what != "methods" and (given.paper or given.costs or given.ideas):
        option = "--paper" if given.paper else "--costs" if given.costs else "--ideas"
        raise BadInput(f"{option} is for methods: `fednorms list methods {option}{' NAME' if given.paper else ''}`.")
    every = index()[given.what] + _MORE.get(given.what, list)()
    rows = _matching(_of_paper(every, given.paper), given.pattern)
    if given.json:
        print_json({given.what: rows})
        return 0
    if not rows:
        raise BadInput(f"{_none(given)} `fednorms list {given.what}` lists all {len(every)}.")
    if given.what == "methods" and not (given.pattern or given.paper or given.ideas or given.costs):
        _by_change(rows)
        return 0
    columns = list(index()["columns"])
    header = [name for name in rows[0] if name not in columns]
    if given.costs:
        header = ["name", *columns]
    console = stdout()
    console.print(grid(header, [[row[name] for name in header] for row in rows], optional=_OPTIONAL))
    if given.costs:
        console.print()
        console.print(grid(["column", "meaning"], [[c, meaning] for c, meaning in index()["columns"].items()]))
        console.print("\nMeasured with the model cnn-small. See also `fednorms describe METHOD`.", markup=False)
    elif hint := _USE.get(given.what):
        console.print(f"\n{hint}", markup=False)
    return 0


# Columns that are left out where a terminal is too narrow, the first one first.
_OPTIONAL = (
    "link",
    "options",
    "paper",
    "pretrained",
    "secure",
    "unseen",
    "server",
    "passes",
    "batch of 1",
    "stateless",
)
_USE = {
    "methods": 'Methods combine with +: --method "scaffold + greg(alpha=1.0) + fedfn". '
    "--costs shows what each method costs and where it works.",
    "partitions": 'Use: --partition "dirichlet(beta=0.3, clients=100)". within=domain divides every domain '
    "separately; test=deal|alike|personal|whole says how test data are divided.",
    "transforms": "Use: --augment flip_rotate. By default the data set's papers decide. Tests use none.",
    "analyses": "Use: `fednorms analyze RUN four-factors`. Curves have one point per kept round "
    "(--keep-checkpoints all).",
}


# What methods change, and what of the column "acts on" it covers. A method is listed under what it acts on first.
_CHANGES = {
    "nothing (the baseline)": ("nothing",),
    "layers": ("layers",),
    "what is shared": ("routes",),
    "loss": ("loss",),
    "gradient": ("gradient",),
    "server's step": ("server step",),
    "averaging": ("client weights", "aggregation", "received updates"),
    "what clients send": ("sent update",),
    "data": ("images", "sites"),
    "course and tests": (),  # everything else
}


def _by_change(rows: Rows) -> None:
    """Print the names of methods in groups, on one screen."""
    groups: dict[str, list[str]] = {title: [] for title in _CHANGES}
    for row in rows:
        first = row["acts on"].partition(",")[0]
        title = next((title for title, covered in _CHANGES.items() if first in covered), "course and tests")
        groups[title].append(row["name"])
    console = stdout()
    cells = [[title, ", ".join(names)] for title, names in groups.items() if names]
    console.print(grid(["changes", f"{len(rows)} methods"], cells))
    console.print(
        '\nMethods combine with +: --method "scaffold + greg(alpha=1.0) + fedfn".\n'
        "`fednorms list methods NAME` shows idea and paper; --ideas shows all of them.\n"
        "--costs shows what methods cost, `fednorms describe METHOD` all details of one.",
        markup=False,
    )


def _none(given: List) -> str:
    which = f' match "{given.pattern}"' if given.pattern else ""
    return f"No {given.what}{which}{f' in the tables of {given.paper}' if given.paper else ''}."


def _of_paper(rows: Rows, paper: str) -> Rows:
    if not paper:
        return rows
    papers: dict[str, list[str]] = index()["papers"]
    if paper.lower() not in papers:
        raise BadInput(f'--paper: no tables of "{paper}": {nearest(paper.lower(), papers)}.')
    return [row for row in rows if row["name"] in papers[paper.lower()]]


def _matching(rows: Rows, pattern: str) -> Rows:
    if any(sign in pattern for sign in "*?["):
        return [row for row in rows if fnmatch.fnmatchcase(row["name"].lower(), pattern.lower())]
    described = ("name", "idea", "paper", "what it is", "what it does", "of", "what it measures")
    return [row for row in rows if any(pattern.lower() in row.get(column, "").lower() for column in described)]


def _custom_methods() -> Rows:
    """The methods of other packages, and of the modules in FEDNORMS_METHODS; these are imported and measured now."""
    if not plugins.custom_methods():
        return []
    from fednorms.cli.index import is_ours
    from fednorms.explain.describe import describe
    from fednorms.explain.overview import MODEL, entries, facts

    avg = describe("fedavg", MODEL)
    return [{**vars(e), **facts(e.name, avg)} for e in entries() if not is_ours(e.name)]


def _other_models() -> Rows:
    rows = []
    for library in ("torchvision", "timm"):
        there = importlib.util.find_spec(library) is not None
        hint = "" if there else "; not installed: pip install 'fednorms[zoo]'"
        what = f"any classification model of {library} by its name{hint}"
        rows.append({"name": f"{library}:NAME", "what it is": what, "pixels": "its own"})
    what = "a custom model: a class or function Net(classes, channels, size) in mymodule.py"
    rows.append({"name": "mymodule:Net", "what it is": what, "pixels": "its own"})
    return rows + [
        {"name": found.name, "what it is": _first_line(found), "pixels": "its own"}
        for found in plugins.found("models").values()
    ]


def _other_federations() -> Rows:
    return [{"name": f.name, "what it is": _first_line(f)} for f in plugins.found("federations").values()]


def _first_line(plugin: plugins.Plugin) -> str:
    lines = (plugin.load().__doc__ or "").strip().splitlines()
    return f"{lines[0] if lines else 'no description'} (from {plugin.package})"


_MORE: dict[str, Callable[[], Rows]] = {
    "methods": _custom_methods,
    "models": _other_models,
    "federations": _other_federations,
}
