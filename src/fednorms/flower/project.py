"""Write a ready Flower project, for `fednorms deploy init`."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.explain.deployable import refuse_obstacles
from fednorms.flower.settings import Deployment, flat
from fednorms.methods.registry import method as read_method
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.atomic import check_folder
from fednorms.runs.toml import dumps

NAME = "fednorms-deployment"
_APP = '''"""The apps that Flower starts: fednorms runs the recipe in pyproject.toml."""

from fednorms.flower import client_app, server_app

client = client_app()
server = server_app()
'''


def write_project(folder: Path, recipe: Recipe, deployment: Deployment, host: str = "server.example") -> list[Path]:
    """Write pyproject.toml, the apps, a README with five commands and a script that makes certificates.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     made = write_project(Path(root, "d"), Recipe(method="fedbn"), Deployment(sites="a,b", classes="cat,dog"))
    ...     [path.name for path in made]
    ['pyproject.toml', 'fednorms_app.py', 'README.md', 'certificates.sh']
    """
    refuse_obstacles(read_method(recipe.method))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists and is not empty. Choose another folder.")
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "pyproject.toml": _pyproject(recipe, deployment),
        "fednorms_app.py": _APP,
        "README.md": _readme(recipe, deployment, host),
        "certificates.sh": _template("certificates.sh").replace("@HOST@", host).replace("@SITES@", _words(deployment)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "certificates.sh").chmod(0o755)
    return [folder / name for name in texts]


def _words(deployment: Deployment) -> str:
    return " ".join(shlex.quote(name) for name in deployment.site_names)


def _pyproject(recipe: Recipe, deployment: Deployment) -> str:
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
            }
        },
    }
    return (
        "# A Flower project; README.md says how to run it. The recipe is in [tool.flwr.app.config]: change it there,\n"
        "# or for one run with: flwr run . --run-config 'rounds=5'. Lists are written as text.\n" + dumps(head)
    )


def _readme(recipe: Recipe, deployment: Deployment, host: str) -> str:
    sites = deployment.site_names
    first = sites[0] if sites else "SITE"
    text = _template("README.md")
    for mark, value in {
        "@METHOD@": recipe.method,
        "@SITES@": ", ".join(sites),
        "@FIRST@": shlex.quote(first),
        "@KEY@": shlex.quote(f"{first}.key"),
        "@NODE@": shlex.quote(f'site="{first}" data="/path/of/FOLDER"'),
        "@CLASSES@": ", ".join(deployment.class_names),
        "@HOST@": host,
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
