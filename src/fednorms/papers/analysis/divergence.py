"""The divergence between the features of two clients' images, as normal distributions per channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DEAD = 1e-3
"""Share of a channel's mean variance below which it counts as constant at a client."""


@dataclass(frozen=True)
class Divergences:
    """The divergence of every pair of clients, and how many of how many channels were left out."""

    matrix: np.ndarray
    dead: int
    channels: int


def divergence(a: Tensor, b: Tensor, dead: float = DEAD) -> float:
    """KL(a||b) + KL(b||a) of normal distributions fitted to each channel of two sets of features, averaged.

    D = mean_c [(v_a + d^2) / (2 v_b) + (v_b + d^2) / (2 v_a) - 1], d = m_a - m_b, over the channels that vary in both.
    GReg, Figure 6.

    >>> wide, far = torch.tensor([[-1.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    >>> round(divergence(wide, far), 6), round(divergence(wide, 2 * wide), 6)
    (4.0, 1.125)
    """
    return float(divergences([a, b], dead).matrix[0, 1])


def divergences(features: Sequence[Tensor], dead: float = DEAD) -> Divergences:
    """`divergence` of every pair, as a symmetric matrix over the channels that vary at every client.

    The divergence of a channel that is constant somewhere is infinite; a small number added to its variance would
    decide the result. A channel is left out if its variance at a client is less than `dead` times its mean variance.

    >>> found = divergences([torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]])])
    >>> found.matrix.round(6).tolist(), found.dead, found.channels
    ([[0.0, 4.0], [4.0, 0.0]], 1, 2)
    """
    moments = [torch.var_mean(f.double(), 0, unbiased=False) for f in features]
    var, mean = (torch.stack(values) for values in zip(*moments, strict=True))
    alive = (var > 0).all(0) & (var >= dead * var.mean(0)).all(0)
    pairs = [(mean[i][alive], var[i][alive]) for i in range(len(features))]
    matrix = np.array([[of_moments(a, b) for b in pairs] for a in pairs])
    return Divergences(matrix, int((~alive).sum()), len(alive))


def of_moments(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """The same, from means and variances; NaN without channels.

    >>> one = torch.ones(1)
    >>> round(of_moments((0 * one, one), (one, 4 * one)), 6)
    1.75
    """
    (m, v), (n, w) = a, b
    d2 = (m - n) ** 2
    return float(((v + d2) / (2 * w) + (w + d2) / (2 * v) - 1).mean())
