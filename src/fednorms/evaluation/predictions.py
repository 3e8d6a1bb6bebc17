"""What a model said about the images of one site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fednorms.core.errors import BadInput


@dataclass(frozen=True, eq=False)
class Predictions:
    """Labels and predicted probabilities of a site's images; `groups` are patients, where they are known.

    >>> Predictions(np.array([0, 1]), np.array([[0.9, 0.1], [0.3, 0.7]])).classes
    2
    """

    labels: np.ndarray
    probabilities: np.ndarray  # images x classes
    groups: np.ndarray | Sequence[str] | None = None
    files: np.ndarray | Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", np.asarray(self.labels, dtype=np.int64))
        object.__setattr__(self, "probabilities", np.asarray(self.probabilities))
        if self.groups is not None:
            object.__setattr__(self, "groups", np.asarray(self.groups, dtype=str))
        shape, n = self.probabilities.shape, len(self.labels)
        counts = [len(named) for named in (self.groups, self.files) if named is not None]
        if len(shape) != 2 or self.labels.shape != (shape[0],) or any(count != n for count in counts):
            raise BadInput(
                "Predictions need one label and one row of probabilities per image, and one group and file if given: "
                f"found {n} labels, probabilities of shape {shape} and {counts} groups or files."
            )
        if n and not (self.labels.min() >= 0 and self.labels.max() < shape[1]):
            raise BadInput(f"Labels must be from 0 to {shape[1] - 1}, one per column of the probabilities.")
        if not np.isfinite(self.probabilities).all():
            raise BadInput("Predictions contain probabilities that are not finite: the model has diverged.")

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.probabilities.shape[1]

    def __len__(self) -> int:
        return len(self.labels)
