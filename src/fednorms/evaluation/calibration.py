"""Calibration: how often a model is right when it says that it is sure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Images whose highest probability is in [low, high): how many, how sure on average, and how often right.

    Confidence and accuracy are NaN in an empty bin. The last bin includes 1.
    """

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float

    def to_dict(self) -> dict[str, float | None]:
        """Plain values, None for NaN."""
        return {k: None if math.isnan(v) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Bin:
        """The inverse of `to_dict`."""
        read: dict[str, Any] = {k: math.nan if v is None else v for k, v in values.items()}
        return cls(**read)


def bin_of(confidence: np.ndarray, bins: int = BINS) -> np.ndarray:
    """The number of each image's bin.

    >>> bin_of(np.array([0.0, 0.19, 0.5, 1.0]), bins=5)
    array([0, 0, 2, 4])
    """
    edges = np.linspace(0, 1, bins + 1).astype(confidence.dtype)
    return np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)


def calibration_error(counts: np.ndarray, confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The expected calibration error: sum over bins of n_b / n |accuracy_b - confidence_b|.

    The arguments are sums over the images of each bin (the last axis): how many there are, their confidence, and how
    many are right.
    Paper: On Calibration of Modern Neural Networks. Guo et al. 2017. https://arxiv.org/abs/1706.04599

    >>> float(calibration_error(np.array([2, 2]), np.array([0.8, 1.8]), np.array([1, 1])))  # right: 0.5 in both bins
    0.25
    """
    return np.abs(right - confidence).sum(-1) / counts.sum(-1)


def reliability(counts: np.ndarray, confidence: np.ndarray, right: np.ndarray) -> list[Bin]:
    """The bins of a reliability diagram from the sums of `calibration_error`."""
    edges = np.linspace(0, 1, len(counts) + 1)
    return [
        Bin(float(low), float(high), int(n), float(c / n) if n else math.nan, float(r / n) if n else math.nan)
        for low, high, n, c, r in zip(edges, edges[1:], counts, confidence, right, strict=False)
    ]
