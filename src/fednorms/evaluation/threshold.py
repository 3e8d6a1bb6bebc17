"""Thresholds of binary models, chosen on validation images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednorms.core.errors import BadInput


@dataclass(frozen=True)
class Threshold:
    """Say class number `positive` from this probability on; `rule` and `chosen_on` say how it was chosen."""

    positive: int
    value: float
    rule: str
    chosen_on: int

    def predicted(self, probabilities: np.ndarray) -> np.ndarray:
        """The class of each image."""
        says = probabilities[:, self.positive] >= self.value
        return np.where(says, self.positive, 1 - self.positive)


def choose_threshold(
    labels: np.ndarray, probabilities: np.ndarray, positive: int = 1, sensitivity: float | None = None
) -> Threshold:
    """Choose the threshold with the highest Youden's J, or the highest one that reaches a sensitivity.

    J is sensitivity + specificity - 1. Of equally good thresholds, the highest is taken. The threshold is halfway
    between two probabilities that occur, so it does not lie on one.
    Paper: Index for rating diagnostic tests. Youden. 1950. https://doi.org/10.1002/1097-0142(1950)3:1<32::AID-CNCR2820030106>3.0.CO;2-3

    >>> labels, p = np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.3, 0.9])
    >>> choose_threshold(labels, np.stack([1 - p, p], 1), sensitivity=1.0).value
    0.2
    """
    if probabilities.shape[1] != 2:
        raise BadInput(f"A threshold is for two classes, but this model has {probabilities.shape[1]}.")
    if sensitivity is not None and not 0 < sensitivity <= 1:
        raise BadInput(f"The sensitivity must be above 0 and at most 1, got {sensitivity:g}.")
    is_positive = labels == positive
    if not is_positive.any() or is_positive.all():
        raise BadInput(
            f"A threshold needs validation images of both classes, found {int(is_positive.sum())} positive images of "
            f"{len(labels)}."
        )
    score = probabilities[:, positive].astype(np.float64)
    known = np.unique(score)[::-1]  # from the highest on
    cuts = np.append((known[:-1] + known[1:]) / 2, 0.0)
    ordered = np.sort(score[is_positive]), np.sort(score[~is_positive])
    hit, false = (1 - np.searchsorted(s, cuts, side="left") / len(s) for s in ordered)
    if sensitivity is not None:
        best = int(np.argmax(hit >= sensitivity - 1e-12))
        return Threshold(positive, float(cuts[best]), f"sensitivity {sensitivity:g}", len(labels))
    best = int(np.argmax(hit - false))
    return Threshold(positive, float(cuts[best]), "Youden's J", len(labels))
