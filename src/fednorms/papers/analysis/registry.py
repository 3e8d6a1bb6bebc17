"""Analyses by name: what each measures in a run, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.stored_run import StoredRun

Kind = Literal["matrices", "curves", "channels", "points", "maps"]


@dataclass(frozen=True)
class Drawing:
    """How findings are drawn: the kind of picture, what the numbers are, and for curves the scale and shared panels."""

    kind: Kind
    y: str = ""
    log: bool = False
    zero: bool = False  # a line at zero
    panels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by title: series in one panel


@dataclass(frozen=True)
class Analysis:
    """Something that can be measured in a run: the figures it belongs to, what it says, how it is drawn."""

    name: str
    figures: str
    says: str
    drawing: Drawing
    measure: Callable[[StoredRun], Findings]


ANALYSES: dict[str, Analysis] = {}
_Measure = Callable[[StoredRun], Findings]


def analysis(name: str, figures: str, drawing: Drawing) -> Callable[[_Measure], _Measure]:
    """Register a function as an analysis; its docstring's first line says what it measures."""

    def register(measure: _Measure) -> _Measure:
        says = (measure.__doc__ or "").partition("\n")[0]
        ANALYSES[name] = Analysis(name, figures, says, drawing, measure)
        return measure

    return register
