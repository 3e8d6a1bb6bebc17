"""Robust ways to combine vectors, from the papers' definitions, one number at a time."""

from __future__ import annotations

import math

import numpy as np


def median(rows: np.ndarray, weights: list[float] | None = None) -> np.ndarray:
    """The median of every column; with weights, the middle of all points with half of the weight on either side."""
    if weights is None:
        return np.median(rows, axis=0)
    found = []
    for column in rows.T:
        total, points = sum(weights), []
        for x in column:
            below = sum(w for value, w in zip(column, weights, strict=True) if value < x)
            above = sum(w for value, w in zip(column, weights, strict=True) if value > x)
            if below <= total / 2 and above <= total / 2:
                points.append(x)
        found.append((min(points) + max(points)) / 2)
    return np.array(found)


def trimmed_mean(rows: np.ndarray, b: int, weights: list[float] | None = None) -> np.ndarray:
    """The mean of every column without its b largest and b smallest values."""
    found = []
    for column in rows.T:
        kept = sorted(zip(column, weights or [1.0] * len(column), strict=True))[b : len(column) - b]
        found.append(sum(x * w for x, w in kept) / sum(w for _, w in kept))
    return np.array(found)


def krum(rows: np.ndarray, f: int, m: int) -> list[int]:
    """The m rows with the lowest sums of squared distances to their n - f - 2 closest others."""
    n, scores = len(rows), []
    for i in range(n):
        others = sorted(float(np.sum((rows[i] - rows[j]) ** 2)) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    return sorted(sorted(range(n), key=lambda i: scores[i])[:m])


def bounded(rows: np.ndarray, most: float) -> np.ndarray:
    """Every row scaled down to a length of at most `most`."""
    return np.array([row * min(1.0, most / math.sqrt(float(np.sum(row**2)))) for row in rows])
