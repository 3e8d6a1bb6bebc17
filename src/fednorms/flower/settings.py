"""The config of a Flower run: recipe and deployment settings, as the scalars that a run config can hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest, shortened
from fednorms.runs.recipe import Recipe
from fednorms.runs.toml import loads

Scalar = bool | int | float | str
_PREFIX = "deploy."


@dataclass(frozen=True)
class Deployment:
    """The settings of a run across machines, besides its recipe."""

    sites: str = ""
    """Names of the sites that may take part, separated by commas; if empty, those connected at the start."""
    minimum: int = 1
    """How many sites must answer for a round to count."""
    wait: float = 600.0
    """Seconds to wait for sites to join before the first round, or for enough of them before a later one."""
    deadline: float = 3600.0
    """Seconds that sites have for their part of a round; the round continues without those that take longer."""
    out: str = "run"
    """The server's run directory (metrics, checkpoints, summary); an unfinished run in it is continued."""
    classes: str = ""
    """Names of the classes in their order, separated by commas: the folder names at every site."""
    channels: int = 3
    """Channels of the images: 3 (RGB), 1 (gray) or 4 (RGBA)."""
    max_weight: float = 0.9
    """The largest share of all training images that a minority of the sites can count for, whatever their cards say; 1:
    no limit."""
    max_images: int = 1_000_000
    """The most training images that a site's card may claim, where the roster has no number for the site."""
    norm_bound: float = 50.0
    """How many times as long as the median site's a site's update can be before it is shortened; 0: no limit."""
    restart: int = 0
    """Continue from the checkpoint of this round and drop later ones, which cannot be used; 0: from the last one."""

    @property
    def site_names(self) -> list[str]:
        """The sites as a list."""
        return listed(self.sites)

    @property
    def class_names(self) -> list[str]:
        """The classes as a list."""
        return listed(self.classes)


def listed(text: str) -> list[str]:
    """Split names separated by commas.

    >>> listed("north, south,")
    ['north', 'south']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def read(config: Mapping[str, Scalar], where: str = "the run config") -> tuple[Recipe, Deployment]:
    """The recipe and the deployment of a Flower run config.

    Keys are a recipe's, with dots ("training.lr"), and `deploy.` ones; lists are written as JSON text. `recipe` may
    hold a whole recipe as TOML, which the other keys then change.

    >>> recipe, deployment = read({"recipe": "rounds = 3", "training.lr": 0.5, "deploy.sites": "a,b"})
    >>> recipe.rounds, recipe.training.lr, deployment.site_names
    (3, 0.5, ['a', 'b'])
    """
    values: dict[str, Any] = loads(str(config.get("recipe", "")), f"recipe in {where}")
    own = {key.removeprefix(_PREFIX): value for key, value in config.items() if key.startswith(_PREFIX)}
    for key, value in config.items():
        if key == "recipe" or key.startswith(_PREFIX):
            continue
        table = values
        *path, last = key.split(".")
        for name in path:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise BadInput(f'Key "{shortened(key)}" in {where} is inside "{name}", which is not a table.')
        table[last] = _list(value, key, where) if isinstance(value, str) and value.startswith("[") else value
    return Recipe.make(values, where), _deployment(own, where)


def _list(text: str, key: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(
            f'Cannot read {key} = "{shortened(text)}" in {where} as a list. Write it as JSON, as in ["global"].'
        ) from None


def _deployment(own: Mapping[str, Scalar], where: str) -> Deployment:
    known: dict[str, type] = {f.name: type(f.default) for f in fields(Deployment)}
    if unknown := [key for key in own if key not in known]:
        raise BadInput(f'Unknown key "deploy.{unknown[0]}" in {where}: {nearest(unknown[0], known)}.')
    made: dict[str, Any] = {}
    for key, value in own.items():
        kind = known[key]
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise BadInput(f"Wrong value of deploy.{key} in {where}: expected {kind.__name__}, got {value!r}.")
        made[key] = kind(value)
    found = Deployment(**made)
    if found.minimum < 1 or found.wait < 0 or found.deadline <= 0:
        raise BadInput(
            f"Wrong value in {where}: deploy.minimum must be at least 1, deploy.wait at least 0 and deploy.deadline "
            "above 0."
        )
    if not 0 < found.max_weight <= 1 or found.restart < 0:
        raise BadInput(
            f"Wrong value in {where}: deploy.max_weight must be above 0 and at most 1, got {found.max_weight:g}, and "
            f"deploy.restart at least 0, got {found.restart}."
        )
    if found.max_images < 1:
        raise BadInput(f"Wrong value in {where}: deploy.max_images must be at least 1, got {found.max_images}.")
    if found.norm_bound != 0 and not found.norm_bound >= 1:
        raise BadInput(
            f"Wrong value in {where}: deploy.norm_bound must be 0 (no limit) or at least 1, got {found.norm_bound:g}."
        )
    if len(set(found.site_names)) < len(found.site_names):
        raise BadInput(f'deploy.sites names a site twice in {where}: "{found.sites}".')
    return found


def flat(recipe: Recipe) -> dict[str, Any]:
    """A recipe as tables of scalars: a Flower project's configuration holds nothing else.

    >>> flat(Recipe(rounds=3))["rounds"], flat(Recipe())["evaluate"]
    (3, '["auto"]')
    """
    values = recipe.to_dict()

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return json.dumps(list(value)) if isinstance(value, (list, tuple)) else value

    for later in ("group", "proxy"):  # added later: a site stores its state under the hash of the other keys
        if not values["data"][later]:
            del values["data"][later]
    recorded = ("version", "fingerprint", "own_parts")
    return {k: plain(v) for k, v in values.items() if v is not None and k not in recorded}


_NOT_RESULTS = (
    "device",
    "threads",
    "engine",
    "workers",
    "memory",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_predictions",
    "state_limit_mb",
    "version",
    "fingerprint",
)


def fingerprint(recipe: Recipe) -> str:
    """A short hash of what a recipe trains, independent of where and how; a site stores its state under it.

    >>> fingerprint(Recipe(rounds=3)) == fingerprint(Recipe(rounds=3, device="cuda")) != fingerprint(Recipe(rounds=4))
    True
    """
    values = {k: v for k, v in flat(recipe).items() if k not in _NOT_RESULTS}
    training = dict(values["training"])
    training["optimiser"] = training.pop("optimizer")  # as version 0.1 wrote it: the hash names folders at sites
    values["training"] = training
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=10).hexdigest()
