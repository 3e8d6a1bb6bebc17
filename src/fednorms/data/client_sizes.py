"""How many samples each client gets.

Papers: the log-normal sizes are those of FedDyn (Acar et al., Federated Learning Based on Dynamic Regularization,
ICLR 2021, https://arxiv.org/abs/2111.04263) and FedDC (Gao et al., CVPR 2022, https://arxiv.org/abs/2203.11751).
"""

from __future__ import annotations

import numpy as np


def lognormal_sizes(total: int, clients: int, sigma: float, r: np.random.RandomState) -> np.ndarray:
    """Sizes n_k ~ exp(N(log(total / clients), sigma^2)), scaled to `total` and rounded down; the rest to the first.

    FedDyn, FedDC. A client that rounding leaves without a sample gets one from the largest. sigma=0: equal sizes.

    >>> lognormal_sizes(12, 3, 0.0, np.random.RandomState(0))
    array([4, 4, 4])
    """
    weights = np.exp(sigma * r.standard_normal(clients))
    sizes = np.floor(weights / weights.sum() * total + 1e-9).astype(np.int64)
    sizes[0] += total - sizes.sum()
    for empty in np.flatnonzero(sizes == 0):
        sizes[np.argmax(sizes)] -= 1
        sizes[empty] = 1
    return sizes


def log_dirichlet(beta: float, shape: tuple[int, ...], r: np.random.RandomState) -> np.ndarray:
    """Logarithms, up to a constant per row, of Dir(beta) samples: for tiny beta the plain ones underflow to 0/0.

    Gamma(beta) = Gamma(beta + 1) U^(1/beta).

    >>> bool(np.isfinite(log_dirichlet(1e-6, (4, 10), np.random.RandomState(0))).all())
    True
    """
    return np.log(r.standard_gamma(beta + 1.0, shape)) + np.log(1.0 - r.random_sample(shape)) / beta


def renormalized(logs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Probabilities over the allowed entries of each row.

    >>> renormalized(np.array([0.0, -9e9, -9e9]), np.array([False, True, True]))
    array([0. , 0.5, 0.5])
    """
    masked = np.where(allowed, logs, -np.inf)
    p = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)
