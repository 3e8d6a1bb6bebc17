"""The divergence between the features of two clients' images, as normal distributions per channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def divergence(a: Tensor, b: Tensor, eps: float = 1e-5) -> float:
    """KL(a||b) + KL(b||a) of normal distributions fitted to each channel of two sets of features, averaged.

    D = mean_c [(v_a + d^2) / (2 v_b) + (v_b + d^2) / (2 v_a) - 1], d = m_a - m_b, with `eps` added to variances, so
    channels that are constant in both contribute nothing. GReg, Figure 6.

    >>> wide, far = torch.tensor([[-1.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    >>> round(divergence(wide, far, eps=0.0), 6), round(divergence(wide, 2 * wide, eps=0.0), 6)
    (4.0, 1.125)
    """
    return of_moments(_moments(a), _moments(b), eps)


def divergences(features: Sequence[Tensor], eps: float = 1e-5) -> np.ndarray:
    """`divergence` of every pair, as a symmetric matrix.

    >>> divergences([torch.tensor([[-1.0], [1.0]]), torch.tensor([[1.0], [3.0]])], eps=0.0).round(6).tolist()
    [[0.0, 4.0], [4.0, 0.0]]
    """
    moments = [_moments(f) for f in features]
    return np.array([[of_moments(a, b, eps) for b in moments] for a in moments])


def of_moments(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], eps: float) -> float:
    """The same, from means and variances.

    >>> one = torch.ones(1)
    >>> round(of_moments((0 * one, one), (one, 4 * one), 0.0), 6)
    1.75
    """
    (m, v), (n, w) = a, b
    v, w, d2 = v + eps, w + eps, (m - n) ** 2
    return float(((v + d2) / (2 * w) + (w + d2) / (2 * v) - 1).mean())


def _moments(f: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(f.double(), 0, unbiased=False)
    return mean, var
