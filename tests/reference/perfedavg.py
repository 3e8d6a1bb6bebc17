"""Per-FedAvg, Fallah et al. 2020: one meta-step by the formulas, for g(w, batch) and its slope h(w, batch)."""

from __future__ import annotations

from collections.abc import Callable


def meta_step(
    g: Callable, w: float, alpha: float, beta: float, variant: str, delta: float = 1e-3, h: Callable | None = None
) -> float:
    v = g(w - alpha * g(w, 0), 1)
    if variant == "hessian_free":
        v = v - alpha * (g(w + delta * v, 2) - g(w - delta * v, 2)) / (2 * delta)
    if variant == "exact":
        v = v - alpha * h(w, 2) * v
    return w - beta * v
