"""How much normalization statistics differ between clients, channel by channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def variance_across(statistics: Sequence[Tensor]) -> float:
    """The population variance over clients of one statistic per channel, averaged over channels.

    Var = mean_c var_k(s_c^k), of running means or of running variances. GReg, Figure 1.

    >>> variance_across([torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.0])])
    0.5
    """
    return float(torch.stack([s.double() for s in statistics]).var(0, unbiased=False).mean())
