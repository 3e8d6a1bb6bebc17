"""The classifier of FedFN: a linear layer that sees features of norm 1.

Paper: FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning. Kim et al. NeurIPS
workshop FL@FM 2023. https://arxiv.org/abs/2311.13267
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.layers.replacement import keep_parameters, place, refuse_other_forward


def unit_norm(features: Tensor, eps: float = 1e-12) -> Tensor:
    """Each row of `features` divided by max(its norm, eps): f / max(|f|, eps).

    >>> unit_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    return features / torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp_min(eps)


class UnitNormLinear(nn.Linear):
    """A linear classifier of unit-norm features: z = W f / |f| (+ b), state-dict keys of Linear.

    The weights are not normalized and there is no temperature. `eps` guards the norm.

    >>> head = UnitNormLinear(2, 3)
    >>> f = torch.tensor([[0.5, -1.0]])
    >>> torch.allclose(head(f), head(7 * f))
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.eps = eps

    @classmethod
    def like(cls, linear: nn.Linear, bias: bool = True, eps: float = 1e-12, name: str = "") -> Self:
        """The same linear layer (the same Parameter objects) on unit-norm features; bias=False drops its bias."""
        refuse_other_forward(linear, nn.Linear, name)
        keep_bias = bias and linear.bias is not None
        dtype = place(linear)["dtype"]
        new = cls(linear.in_features, linear.out_features, keep_bias, eps, device="meta", dtype=dtype)
        keep_parameters(linear, new, *(("weight", "bias") if keep_bias else ("weight",)))
        return new

    def forward(self, input: Tensor) -> Tensor:
        """The logits of features of shape (..., in_features)."""
        return F.linear(unit_norm(input, self.eps), self.weight, self.bias)
