"""Four factors of a classifier: how its rows and the features of classes lie to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


@dataclass(frozen=True)
class FourFactors:
    """Cosines: between rows of the classifier, between classes' mean features, of features to the mean of their class,
    and of each class's mean feature to its row. NaN for classes without images.
    """

    weights: Array  # classes x classes
    between: Array  # classes x classes
    within: Array  # classes
    alignment: Array  # classes

    @property
    def scalars(self) -> dict[str, float]:
        """One number for each: the mean off the diagonal, or over classes."""
        off = ~np.eye(len(self.within), dtype=bool)
        values = {
            "weight similarity": self.weights[off],
            "similarity between classes": self.between[off],
            "similarity within classes": self.within,
            "alignment of weights": self.alignment,
        }
        return {name: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for name, v in values.items()}


def four_factors(features: Tensor, labels: Tensor, weight: Tensor, *, normalise_first: bool = False) -> FourFactors:
    """The four factors of features (N x D) of labelled images under a classifier (C x D).

    m_c = mean of f over class c; cos(W_i, W_j), cos(m_i, m_j), mean over class c of cos(f, m_c), cos(m_c, W_c).
    `normalise_first` takes features of length 1, as FedFN's classifier sees them. Kim et al., FedFN, Figures 1 and 5,
    whose appendix writes inner products for two of them where the text says cosine: cosines.

    >>> f = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    >>> found = four_factors(f, torch.tensor([0, 0, 1, 1]), torch.eye(2))
    >>> found.weights.tolist(), found.between.tolist(), found.within.tolist(), found.alignment.tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], [1.0, 1.0])
    """
    f, w = features.double(), weight.double()
    f = _unit(f) if normalise_first else f
    classes = len(w)
    means = torch.stack([f[labels == c].mean(0) for c in range(classes)])  # NaN where there are none
    within = torch.stack([(_unit(f[labels == c]) @ _unit(means[c])).mean() for c in range(classes)])
    m, rows = _unit(means), _unit(w)
    found = rows @ rows.T, m @ m.T, within, (m * rows).sum(1)
    return FourFactors(*(t.cpu().numpy() for t in found))


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
