"""Four factors of a classifier: the angles between its rows and the features of classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

Array = np.ndarray


@dataclass(frozen=True)
class FourFactors:
    """Cosines between rows of the classifier, between classes' mean features, between features and the mean of their
    class, and between each class's mean feature and its row. NaN for classes without images.
    """

    weights: Array  # classes x classes
    between: Array  # classes x classes
    within: Array  # classes
    alignment: Array  # classes

    @property
    def scalars(self) -> dict[str, float]:
        """One number per factor: the mean off the diagonal, or over classes."""
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
    `normalise_first` scales features to length 1, as FedFN's classifier does. Kim et al., FedFN, Figures 1 and 5. Its
    appendix writes inner products for two factors where the text says cosine; these are cosines.

    >>> f = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    >>> found = four_factors(f, torch.tensor([0, 0, 1, 1]), torch.eye(2))
    >>> found.weights.tolist(), found.between.tolist(), found.within.tolist(), found.alignment.tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], [1.0, 1.0])
    """
    f, unit = features.double(), normalize(features.double())
    f = unit if normalise_first else f
    each = [labels == c for c in range(len(weight))]
    m = normalize(torch.stack([f[own].mean(0) for own in each]))  # NaN for classes without images
    rows = normalize(weight.double())
    within = torch.stack([(unit[own] @ mean).mean() for own, mean in zip(each, m, strict=True)])
    found = rows @ rows.T, m @ m.T, within, (m * rows).sum(1)
    return FourFactors(*(t.cpu().numpy() for t in found))
