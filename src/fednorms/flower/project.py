"""Write a ready Flower project, for `fednorms deploy init`."""

from __future__ import annotations

import shlex
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.flower.settings import Deployment, flat, read
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.atomic import check_folder
from fednorms.runs.toml import dumps

NAME = "fednorms-deployment"
HOST, PORT = "server.example", 8443
_APP = '''"""The apps that Flower starts: fednorms runs the recipe in pyproject.toml."""

from fednorms.flower import client_app, server_app

client = client_app()
server = server_app()
'''


def write_project(
    folder: Path, recipe: Recipe, deployment: Deployment, host: str = HOST, port: int = PORT
) -> list[Path]:
    """Write pyproject.toml, the apps, and a README with the commands for the server and for a site.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     made = write_project(Path(root, "d"), Recipe(method="fedbn"), Deployment(sites="a,b", classes="cat,dog"))
    ...     [path.name for path in made]
    ['pyproject.toml', 'fednorms_app.py', 'README.md']
    """
    from fednorms.explain.deployable import refuse_obstacles  # with torch, which help does not need
    from fednorms.methods.registry import method

    refuse_obstacles(method(recipe.method))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists and is not empty. Choose another folder.")
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "pyproject.toml": _pyproject(recipe, deployment, f"{host}:{port}"),
        "fednorms_app.py": _APP,
        "README.md": _readme(recipe, deployment, host, port),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def read_project(folder: Path) -> tuple[Recipe, Deployment]:
    """The recipe and the deployment of a project that `deploy init` wrote."""
    path = folder / "pyproject.toml"
    try:
        config = _told(folder)["tool"]["flwr"]["app"]["config"]
    except KeyError as error:
        raise BadInput(f"{folder} is not a project: cannot read [tool.flwr.app.config] of {path} ({error}).") from None
    flat: dict[str, Any] = {}

    def spread(table: dict[str, Any], start: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                spread(value, f"{start}{key}.")
            else:
                flat[start + key] = value

    spread(config, "")
    return read(flat, str(path))


def read_address(folder: Path) -> tuple[str, int]:
    """Host and port at which the sites reach the server of a project."""
    address = _told(folder).get("tool", {}).get("fednorms", {}).get("address")
    if address is None:
        raise BadInput(
            f'{folder / "pyproject.toml"} does not name the server. Add: [tool.fednorms] address = "HOST:{PORT}"'
        )
    return split_address(str(address), f"address in {folder / 'pyproject.toml'}")


def read_door(folder: Path) -> dict[str, Any]:
    """What a project says about the limits of its door; empty if nothing."""
    found = _told(folder).get("tool", {}).get("fednorms", {}).get("door", {})
    if not isinstance(found, dict):
        raise BadInput(f"{folder / 'pyproject.toml'}: [tool.fednorms.door] is a table; found {found!r}.")
    return found


def split_address(text: str, where: str) -> tuple[str, int]:
    """Host and port of an address.

    >>> split_address("server.example:8443", "--server"), split_address("[::1]:8443", "--server")
    (('server.example', 8443), ('[::1]', 8443))
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise BadInput(f'{where} is not an address: expected HOST:PORT, found "{text}".')
    return host, int(port)


def _told(folder: Path) -> dict[str, Any]:
    path = folder / "pyproject.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{folder} is not a project: cannot read [tool.flwr.app.config] of {path} ({error}).") from None


def _pyproject(recipe: Recipe, deployment: Deployment, address: str) -> str:
    config: dict[str, Any] = {**flat(recipe), "deploy": dict(vars(deployment))}
    head = {
        "project": {
            "name": NAME,
            "version": "1.0.0",
            "description": "One federated training run across sites",
            "dependencies": ["fednorms[flower]"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fednorms",
                    "fab-include": ["fednorms_app.py"],
                    "components": {"serverapp": "fednorms_app:server", "clientapp": "fednorms_app:client"},
                    "config": config,
                }
            },
            "fednorms": {"address": address},
        },
    }
    return (
        "# A Flower project; README.md says how to run it. The recipe is in [tool.flwr.app.config]: change it there,\n"
        "# or for one run with: flwr run . --run-config 'rounds=5'. Lists are written as text.\n" + dumps(head)
    )


def _readme(recipe: Recipe, deployment: Deployment, host: str, port: int) -> str:
    sites = deployment.site_names
    first = sites[0] if sites else "SITE"
    text = _template("README.md")
    for mark, value in {
        "@METHOD@": recipe.method,
        "@SITES@": ", ".join(sites),
        "@FIRST@": shlex.quote(first),
        "@KEY@": shlex.quote(f"{first}.key"),
        "@CLASSES@": ", ".join(deployment.class_names),
        "@FIRSTFILE@": first,
        "@HOST@": host,
        "@PORT@": str(port),
        "@OUT@": deployment.out,
        "@COUNT@": _all_sites(len(sites) or deployment.minimum),
        "@WAIT@": f"{deployment.wait:g}",
        "@MINIMUM@": "one has" if deployment.minimum == 1 else f"{deployment.minimum} have",
    }.items():
        text = text.replace(mark, value)
    return text


def _all_sites(count: int) -> str:
    return {1: "the site has", 2: "both sites have"}.get(count, f"all {count} sites have")


def _template(name: str) -> str:
    return files("fednorms.flower").joinpath("templates", name).read_text(encoding="utf-8")
