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
    federation = recipe.federation.removeprefix("folder:").removeprefix("custom:").rstrip("/").rpartition("/")[2]
    return f"{slug(method)}-{slug(federation)}-{recipe.seed}"
