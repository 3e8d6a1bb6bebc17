"""Server optimizers: Reddi et al. 2021, algorithm 2, and Hsu et al. 2019, number by number on a list of updates."""

from __future__ import annotations

import math


def adaptive(kind: str, updates: list[float], lr: float, beta1: float, beta2: float, tau: float) -> list[float]:
    """The value of one parameter after each round, starting from 0."""
    x, m, v = 0.0, 0.0, tau**2
    places = []
    for delta in updates:
        m = beta1 * m + (1 - beta1) * delta
        if kind == "fedadagrad":
            v = v + delta**2
        elif kind == "fedyogi":
            sign = (v > delta**2) - (v < delta**2)
            v = v - (1 - beta2) * delta**2 * sign
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + lr * m / (math.sqrt(v) + tau)
        places.append(x)
    return places


def momentum(updates: list[float], lr: float, beta: float) -> list[float]:
    x, v = 0.0, 0.0
    places = []
    for delta in updates:
        v = beta * v + delta
        x = x + lr * v
        places.append(x)
    return places
