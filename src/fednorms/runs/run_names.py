"""Short names of runs, for directories and trackers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fednorms.runs.recipe import Recipe


def slug(text: str) -> str:
    """A method as a file name.

    >>> slug("scaffold + greg(alpha=1.0)")
    'scaffold+greg-alpha-1.0'
    """
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower().replace(" ", "").replace("/", "-")).strip("-.") or "run"


def default_name(method: str, recipe: Recipe) -> str:
    """The name of a run's directory.

    >>> default_name("scaffold + fedbn", Recipe(seed=3))
    'scaffold+fedbn-digits-shift-3'
    """
    return f"{slug(method)}-{slug(short(recipe.federation))}-{recipe.seed}"


def short(name: str) -> str:
    """A recipe's federation or model for headlines: a folder without its path, a custom object without its hash.

    >>> short("folder:/data/hospitals"), short("custom:Net@12ab.34cd"), short("digits-shift")
    ('hospitals', 'Net', 'digits-shift')
    """
    if name.startswith("custom:"):
        return name.removeprefix("custom:").partition("@")[0]
    return name.removeprefix("folder:").rstrip("/").rpartition("/")[2]


def folders_of(labels: Iterable[str]) -> list[str]:
    """The folders of a comparison's methods, without the seed; those with the same slug are numbered.

    >>> folders_of(["scaffold + fedbn", "Scaffold+FedBN"])
    ['scaffold+fedbn', 'scaffold+fedbn-v2']
    """
    names: list[str] = []
    for label in labels:
        name, number = slug(label), 2
        while name in names:
            name, number = f"{slug(label)}-v{number}", number + 1
        names.append(name)
    return names
