"""What is known before anything is trained: how many points each method lost on federations like this one.

The records come from `benchmarks/advise.py`. They are weighted by how near their measures are to the federation's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

# Measures that say what kind of federation it is, and how they are put on a scale on which distances mean something.
_SCALES = {
    "label_tv": lambda v: v / 0.25,
    "feature_w2_class": lambda v: math.log10(v + 0.01) / 0.5,
    "gradient_b2": lambda v: math.log10(max(v, 1.0)) / 0.5,
    "images": lambda v: math.log10(v) / 0.5,
    "sites": lambda v: math.log10(v) / 0.5,
}
Record = Mapping[str, Any]


@cache
def records() -> tuple[Record, ...]:
    """The federations on which all methods ran in full; each has its data set, its measures and the points lost."""
    text = files("fednorms.advice").joinpath("priors.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["records"])


def expected_loss(measures: Mapping[str, float | None], known: Sequence[Record]) -> dict[str, float]:
    """Points that each method is expected to lose to the best one: the mean over known federations, near ones first.

    The weight of a federation at distance d is exp(-d^2 / 2), plus a little so that far ones still count. A measure
    that either does not have is left out of the distance.
    """
    total: dict[str, float] = {}
    whole: dict[str, float] = {}
    for record in known:
        weight = math.exp(-(_distance(measures, record["measures"]) ** 2) / 2) + 0.01
        for arm, lost in record["lost"].items():
            total[arm] = total.get(arm, 0.0) + weight * lost
            whole[arm] = whole.get(arm, 0.0) + weight
    return {arm: total[arm] / whole[arm] for arm in total}


def _distance(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> float:
    square = 0.0
    for name, scale in _SCALES.items():
        x, y = a.get(name), b.get(name)
        if x is not None and y is not None:
            square += (scale(x) - scale(y)) ** 2
    return math.sqrt(square)
