"""Small runs that keep the state after every round, for analyses."""

from __future__ import annotations

from pathlib import Path

import fednorms as fn

SMALL = {"federation": "digits-shift", "model": "cnn-small", "data": {"size": 8, "val": 0.1, "test": 0.8}}


def kept(path: Path, method: str = "fedavg", rounds: int = 3, **options: object) -> Path:
    """Run a method; returns the run's directory."""
    recipe = {"method": method, "rounds": rounds, "keep_checkpoints": "all"} | options
    fn.run(recipe=fn.Recipe.make(SMALL | recipe), out=path)
    return path
