"""Short names of runs, for directories and trackers."""

from __future__ import annotations

import re

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
