"""`fednorms deploy`: a Flower project, and the commands for its server and its sites."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro

from fednorms.cli.output import grid, print_json, print_result, stdout
from fednorms.cli.parsing import DataOptionsButChannels, Flag, RecipeOptions, Text, TrainingOptions, merged, parse
from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.flower.project import read_project
from fednorms.flower.settings import Deployment
from fednorms.runs.recipe import Recipe

_USAGE = """usage: fednorms deploy COMMAND [OPTIONS]

Train across machines with Flower. Data stay at their sites.

On the server:
  init          write a Flower project: apps, recipe, and a README
  certificates  create authority, server's certificate and the sites' keys
  enroll        add a site's public key to the roster, or replace it
  revoke        remove a site's key from the roster, also for the running round
  link          start Flower's link on this machine, and the door for the sites
  probe         test a running door as an outsider: all must be refused

At a site:
  check         check the site's data folder against a project; sends nothing
  node          connect the site, and answer with its own copy of the project
  audit         show what the site was asked and what it sent, and check the log
  export        write the site's model, from the server's run and its own state

`fednorms deploy COMMAND --help` shows a command's options."""


@dataclass
class Init:
    """Write a Flower project: apps, recipe, and a README with all commands for the server and for a site."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """A new folder for the project."""
    sites: Annotated[list[str], tyro.conf.arg(metavar="SITE [SITE ...]")]
    """Names of the sites."""
    classes: Annotated[list[str], tyro.conf.arg(metavar="CLASS [CLASS ...]")]
    """Names of the classes, which are the names of the image folders at every site."""
    host: str = "server.example"
    """Host name or address of the server, as the sites reach it."""
    port: int = 8443
    """Port of the server's door, as the sites reach it."""
    channels: int = 3
    """Channels of the images: 3 (RGB), 1 (grey) or 4 (RGBA)."""
    minimum: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: 2, or 1 with one site)")] = None
    """Number of sites that must answer for a round to count. A mean over one site is that site's model."""
    deadline: float = 3600.0
    """Seconds that sites have to answer in a round."""
    recipe: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="", metavar="FILE")] = None
    """A recipe in TOML."""
    run: RecipeOptions = field(default_factory=RecipeOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    data: DataOptionsButChannels = field(default_factory=DataOptionsButChannels)
    json: Flag = False
    """Print one JSON object and nothing else."""


@dataclass
class Check:
    """Check a site's data folder against a project before it joins. Nothing is sent."""

    project: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PROJECT")]
    """The project's folder."""
    data: Path
    """The site's folder of CLASS/image."""
    site: Text = ""
    """The site's name, as in the project."""
    policy: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: FEDNORMS_POLICY)")] = (
        None
    )
    """The site's policy, as in its node's config: a project that asks for more is refused."""
    json: Flag = False
    """Print one JSON object and nothing else."""


@dataclass
class Export:
    """At a site: write its personal model, from a copy of the server's run and the state on the site's disk."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The server's run directory, or a copy of it."""
    site: str
    """The site's name."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """A new directory for the model."""
    state: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: the nodes' folder)")] = (
        None
    )
    """The state folder of the site's node config."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def deploy(args: Sequence[str]) -> int:
    """The command."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {"init": _init, "check": _check, "export": _export}
    commands |= {
        name: _elsewhere("deploy_server", name) for name in ("certificates", "enroll", "revoke", "link", "probe")
    }
    commands |= {name: _elsewhere("deploy_node", name) for name in ("node", "audit")}
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if args else 2
    if args[0] not in commands:
        known = nearest(args[0], commands)
        raise BadInput(f'Unknown command "deploy {args[0]}": {known}. See `fednorms deploy --help`.')
    return commands[args[0]](args[1:])


def _elsewhere(module: str, name: str) -> Callable[[Sequence[str]], int]:
    """A command that needs Flower, and is imported when it is called."""

    def call(args: Sequence[str]) -> int:
        from fednorms.flower import require_flower

        if args[:1] not in (["-h"], ["--help"]):
            require_flower()
        return int(getattr(import_module(f"fednorms.cli.{module}"), name)(args))

    return call


def _init(args: Sequence[str]) -> int:
    given = parse(Init, "deploy init", args)
    from fednorms.flower.project import write_project
    from fednorms.flower.site import AT_THE_SITES

    recipe = merged(Recipe.read(given.recipe) if given.recipe else Recipe(), given.run, given.training, given.data)
    if recipe.data.size is None:
        raise BadInput("Sites may have images of different sizes. Set a common size with --size PIXELS.")
    if given.run.federation is None and given.recipe is None:
        recipe = recipe.model_copy(update={"federation": AT_THE_SITES})
    deployment = Deployment(
        sites=_joined("sites", given.sites),
        classes=_joined("classes", given.classes),
        minimum=min(2, len(given.sites)) if given.minimum is None else given.minimum,
        deadline=given.deadline,
        channels=given.channels,
    )
    _check_request(recipe, deployment, given.host, given.port)
    made = write_project(given.folder, recipe, deployment, given.host, given.port)
    if given.json:
        print_json({"project": str(given.folder), "files": [str(path) for path in made]})
    else:
        stdout().print(f"Wrote {', '.join(p.name for p in made)} into {given.folder}; start with its README.md.")
    return 0


def _check_request(recipe: Recipe, deployment: Deployment, host: str, port: int) -> None:
    """Find problems that would otherwise appear only at the sites, and report all of them at once."""
    from fednorms.core.preprocessing import Preprocessing
    from fednorms.data.facts import Facts, SiteFacts
    from fednorms.data.sizes import sides
    from fednorms.runs.assemble import assemble
    from fednorms.runs.losses import cross_entropy

    sites, classes = deployment.site_names, deployment.class_names
    weights, data = recipe.class_weights, recipe.data
    wrong = {
        "--sites is empty": not sites,
        f"--minimum is 1 to {len(sites)}, as many as there are sites; got {deployment.minimum}": bool(sites)
        and not 1 <= deployment.minimum <= len(sites),
        f"--deadline is a number of seconds above 0; got {deployment.deadline}": not 0 < deployment.deadline < math.inf,
        f"--channels is 1, 3 or 4; got {deployment.channels}": deployment.channels not in (1, 3, 4),
        f"--host is a name or an address; got {host!r}": not re.fullmatch(r"[A-Za-z0-9._:\[\]-]+", host),
        f"--port is 1 to 65535; got {port}": not 0 < port < 2**16,
        f"--class-weights needs {len(classes)} numbers, one per class": isinstance(weights, list)
        and len(weights) != len(classes),
        "--hold-out, --proxy and --partition are for data in one place; here every site trains on its own data": bool(
            data.hold_out or data.proxy or data.partition
        ),
    }
    if problems := [text for text, found in wrong.items() if found]:
        raise BadInput("deploy init: " + "; ".join(problems) + ".")
    assert data.size is not None
    shape = (deployment.channels, *sides(data.size))
    named = tuple(SiteFacts(name, name) for name in sites)
    facts = Facts("deployment", tuple(classes), shape, "uint8", Preprocessing(), named, tuple(sites), 0)
    here = {"device": "cpu", "pretrained": False, "weights": ""}  # without downloads, on any machine
    assemble(recipe.model_copy(update=here), facts, loss=cross_entropy)


def _joined(what: str, names: list[str]) -> str:
    problems = [n for n in names if set(n) & set(',/\\"') or not n.strip()]
    if problems or len(set(names)) < len(names):
        got = ", ".join(map(repr, names))
        raise BadInput(f'--{what} are different names without commas, slashes, backslashes and ", got {got}.')
    return ",".join(names)


def _check(args: Sequence[str]) -> int:
    given = parse(Check, "deploy check", args)
    from fednorms.data.facts import Facts
    from fednorms.flower.policy import Policy
    from fednorms.flower.site import open_site
    from fednorms.runs.assemble import assemble

    recipe, deployment = read_project(given.project)
    if given.site and given.site not in deployment.site_names:
        raise BadInput(f'No site "{given.site}" in {given.project}: {nearest(given.site, deployment.site_names)}')
    Policy.of({"policy": str(given.policy)} if given.policy else {}).check(recipe, deployment)
    node: dict[str, Any] = {"data": str(given.data)} | ({"site": given.site} if given.site else {})
    found = open_site(recipe, deployment, node)
    site = found.sites[0]
    counts = site.counts(found.num_classes)
    assemble(recipe.resolved().model_copy(update={"pretrained": False, "weights": ""}), Facts.of(found))
    if not counts.get("train"):
        raise BadInput(f"{given.data}: no training images.")
    empty = [c for c, n in zip(found.classes, counts["train"], strict=True) if n == 0]
    if given.json:
        print_json({"site": site.name, "shape": list(found.shape), "classes": list(found.classes), "images": counts})
        return 0
    console = stdout()
    rows = [[c, *(str(n[i]) for n in counts.values())] for i, c in enumerate(found.classes)]
    console.print(grid(["class", *counts], rows, numbers_from=1))
    console.print(
        f"\nSite {site.name}: images {'x'.join(map(str, found.shape))}. It fits {given.project}.", markup=False
    )
    if given.policy:
        console.print(f"The policy {given.policy} allows what the project asks for.", markup=False)
    if empty:
        console.print(f"note: no training image of {', '.join(empty)}", markup=False)
    return 0


def _export(args: Sequence[str]) -> int:
    given = parse(Export, "deploy export", args)
    from fednorms.flower.collect import export_at_site

    done = export_at_site(given.run, given.site, given.out, given.state)
    print_result(done, as_json=given.json)
    return 0
