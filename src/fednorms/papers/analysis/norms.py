"""Norms of classifier rows and features, for classes that a client has seen and for the others."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def seen_and_unseen(values: Tensor, classes: Tensor, seen: Collection[int]) -> tuple[float, float]:
    """The mean of values whose class is in `seen`, and of the others; NaN if there are none.

    With the norms of a classifier's rows and classes 0, 1, ...: W_ID and W_OOD of FedFN; with the norms of test
    images' raw features and their labels: F_ID and F_OOD. Kim et al., FedFN, Figures 2 to 4.

    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> seen_and_unseen(rows.norm(dim=1), torch.arange(2), {0})
    (5.0, 1.0)
    """
    inside = torch.isin(classes.cpu(), torch.tensor(sorted(seen), dtype=classes.dtype))
    v = values.double().cpu()
    return float(v[inside].mean()), float(v[~inside].mean())
