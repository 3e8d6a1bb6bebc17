"""AUROC and AUPRC of each class against the rest: by scikit-learn, and for many bootstrap replicates at once."""

from __future__ import annotations

from typing import Any

import numpy as np

_ELEMENTS = 1_000_000  # replicates x images that are handled at a time: they fit into a processor's cache


def point_ranks(labels: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AUROC and average precision of each class; NaN where all or none of the images belong to it."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    found = np.full((2, probabilities.shape[1]), np.nan)
    for c in _judged(labels, probabilities):
        found[:, c] = [f(labels == c, probabilities[:, c]) for f in (roc_auc_score, average_precision_score)]
    return found[0], found[1]


def replicate_ranks(labels: np.ndarray, probabilities: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AUROC and average precision, replicates x classes, where images are drawn so often (replicates x images).

    Images are sorted once per class. AUROC is the area under the steps of (false positives, true positives) by the
    trapezoidal rule; average precision is the sum over steps of precision times the step in recall.
    """
    found = np.full((2, len(drawn), probabilities.shape[1]), np.nan)
    rows = max(1, _ELEMENTS // max(1, len(labels)))
    for c in _judged(labels, probabilities):
        order = np.argsort(-probabilities[:, c], kind="stable")
        score = probabilities[order, c]
        ends = np.flatnonzero(np.append(score[1:] != score[:-1], True))  # equal scores are one step of the curve
        positive = (labels[order] == c).astype(drawn.dtype)
        for start in range(0, len(drawn), rows):
            some = slice(start, start + rows)
            found[:, some, c] = _areas(drawn[some][:, order], positive, ends)
    return found[0], found[1]


def _judged(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The classes that some images belong to and others do not."""
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    return np.flatnonzero((counts > 0) & (counts < len(labels)))


def _areas(drawn: np.ndarray, positive: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    exact: Any = np.float32 if drawn.shape[1] < 2**24 else np.float64  # both count images exactly
    every = np.cumsum(drawn, axis=1, dtype=exact)[:, ends]
    true = np.cumsum(drawn * positive, axis=1, dtype=exact)[:, ends]
    steps = np.diff(true, axis=1, prepend=exact(0))
    false = every - true
    positives, negatives = true[:, -1].astype(float), false[:, -1].astype(float)
    precision = true / np.maximum(every, 1)
    below = negatives[:, None] - false  # negatives ranked lower than this step
    tied = np.diff(false, axis=1, prepend=exact(0))
    with np.errstate(invalid="ignore"):  # NaN where no positive or no negative image was drawn
        auroc = (steps * (below + tied / 2)).sum(1, dtype=float) / (positives * negatives)
        auprc = (steps * precision).sum(1, dtype=float) / positives
    return auroc, np.where(negatives > 0, auprc, np.nan)
