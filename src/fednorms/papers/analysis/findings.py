"""The findings of an analysis, as plain values for a JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fednorms.core.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Findings:
    """Numbers, numbers by round, arrays, and words that describe them.

    `analysis` and `label` (the run) name what was measured, for pictures.

    >>> found = Findings({"gap": 0.25}, {"loss": [(1, 0.5)]}, {"points": np.zeros((1, 2))}, {"client": "a"})
    >>> Findings.of(found.plain()).plain() == found.plain()
    True
    """

    scalars: dict[str, float] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, str | list[str]] = field(default_factory=dict)
    analysis: str = ""
    label: str = ""

    def plot(self, *others: Findings) -> Figure:
        """Draw the findings, next to those of other runs if given, with shared scales. Needs the extra "report".

        Findings with the same label are drawn as seeds of one line.
        """
        from fednorms.papers.analysis.measures import analysis_named
        from fednorms.papers.analysis.picture import figure

        if other := next((o for o in others if o.analysis != self.analysis), None):
            raise BadInput(f'Findings of "{self.analysis}" and "{other.analysis}" cannot share a picture.')
        found: dict[str, list[Findings]] = {}
        for one in (self, *others):
            found.setdefault(one.label, []).append(one)
        return figure(analysis_named(self.analysis), {"": found}, self.analysis)

    def plain(self) -> dict[str, Any]:
        """Values for JSON; numbers that are not finite become null."""
        return {
            "scalars": {k: _number(v) for k, v in self.scalars.items()},
            "series": {k: [[t, _number(v)] for t, v in s] for k, s in self.series.items()},
            "arrays": {k: _numbers(a.tolist()) for k, a in self.arrays.items()},
            "words": dict(self.words),
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Findings:
        """Read what `plain` returned."""
        return cls(
            {k: _back(v) for k, v in values["scalars"].items()},
            {k: [(int(t), _back(v)) for t, v in s] for k, s in values["series"].items()},
            {k: np.array(a, dtype=float) for k, a in values["arrays"].items()},
            dict(values["words"]),
        )


def last_of(series: Mapping[str, Series]) -> dict[str, float]:
    """The last value of every curve.

    >>> last_of({"gap": [(1, 0.5), (2, 0.25)]})
    {'gap, last': 0.25}
    """
    return {f"{name}, last": s[-1][1] for name, s in series.items()}


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _numbers(values: Any) -> Any:  # noqa: ANN401
    return [_numbers(v) for v in values] if isinstance(values, list) else _number(values)


def _back(value: float | None) -> float:
    return math.nan if value is None else float(value)
