"""Features in two dimensions: one t-SNE map of the same images under one or several models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fednorms.core.noise import permutation


def balanced_rows(groups: Tensor, n: int) -> Tensor:
    """About n row numbers, equally many of every group (all of a smaller one), chosen by a fixed key.

    >>> rows = balanced_rows(torch.tensor([0] * 50 + [1] * 3), 8)
    >>> [int((torch.tensor([0] * 50 + [1] * 3)[rows] == g).sum()) for g in (0, 1)]
    [4, 3]
    """
    found = []
    names = groups.unique().tolist()
    for number, group in enumerate(names):
        rows = (groups == group).nonzero().squeeze(1)
        share = n // len(names) + (number < n % len(names))
        found.append(rows[permutation(len(rows), "embedding", int(group), len(rows))[:share].sort().values])
    return torch.cat(found)


def embedding(features: Sequence[Tensor], *, perplexity: float = 30.0, seed: int = 0) -> list[np.ndarray]:
    """t-SNE of several sets of features together (scikit-learn; PCA start): for each set, its points (N x 2).

    FedNN, Figures 6 and 7. With few images the perplexity is reduced, as t-SNE requires.

    >>> f = torch.rand(20, 5, generator=torch.Generator().manual_seed(0))
    >>> [points.shape for points in embedding([f, f + 1])]
    [(20, 2), (20, 2)]
    """
    from sklearn.manifold import TSNE

    every = torch.cat([f.double() for f in features]).cpu().numpy()
    usable = min(perplexity, (len(every) - 1) / 3)
    points = TSNE(2, perplexity=usable, init="pca", random_state=seed).fit_transform(every)
    return np.split(points, np.cumsum([len(f) for f in features])[:-1])
