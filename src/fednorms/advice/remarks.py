"""What a search cannot know: best values at the edge of a grid, and curves that still rise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednorms.advice.tournament import Trial


def at_edge(values: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[str]:
    """The keys whose chosen value is the smallest or the largest number of its grid.

    >>> at_edge({"lr": 0.3, "mu": 0.1}, {"lr": [0.03, 0.1, 0.3], "mu": [0.01, 0.1, 1.0]})
    ['lr']
    """
    numbers = {k: v for k, v in grid.items() if len(v) > 1 and all(type(x) in (int, float) for x in v)}
    return [k for k, v in numbers.items() if values.get(k) in (min(v), max(v))]


def still_rising(curve: Sequence[tuple[int, float]], points: float = 1.0) -> bool:
    """Whether a curve gained more than so many points in the last quarter of its rounds.

    >>> still_rising([(1, 0.5), (2, 0.6), (3, 0.7), (4, 0.8)]), still_rising([(1, 0.5), (2, 0.8), (3, 0.8), (4, 0.8)])
    (True, False)
    """
    if len(curve) < 2:
        return False
    last, value = curve[-1]
    before = [a for t, a in curve if t <= 0.75 * last]
    return bool(before) and 100 * (value - before[-1]) > points


def remarks(trial: Trial, grid: Mapping[str, Sequence[Any]], curve: Sequence[tuple[int, float]]) -> list[str]:
    """Both, in words."""
    said = []
    for key in at_edge(trial.values, grid):
        tried = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in grid[key])
        said.append(f"{trial.arm}: {key} {trial.values[key]:g} is at the edge of its grid ({tried}); try more values.")
    if still_rising(curve):
        said.append(f"{trial.arm}: its validation curve still rises after round {curve[-1][0]}; more rounds may help.")
    return said
