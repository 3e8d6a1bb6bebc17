"""Hybrid batch normalization: a learned mixture of batch statistics and those sent by the server.

Paper: Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning. Chen et al. ICML
2025. https://arxiv.org/abs/2505.21877
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.moments import batch_moments
from fednorms.core.norms import Statistics, Tensors, norm_layer
from fednorms.layers.given_norm import GivenNorm


def _batch_only(layer: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    return {"phi": torch.full_like(tensors["phi"], torch.inf)}  # sigmoid: all weight on the batch


@norm_layer(Statistics("mean", "var", batch_only=_batch_only))
class HybridNorm(GivenNorm):
    """Normalize with a mixture of batch and global statistics in training, with global ones in evaluation.

    a = sigmoid(phi) per channel; mu = (1 - a) mu_g + a mu_b, v = (1 - a) v_g + a v_b (biased); y = gamma (x - mu) /
    sqrt(v + eps) + beta. Gradients flow through phi and the batch statistics; the global statistics `mean`, `var` are
    constants that the layer never changes.

    >>> layer = HybridNorm(3)
    >>> sorted(layer.state_dict())
    ['bias', 'mean', 'phi', 'var', 'weight']
    >>> layer.eval()(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, eps, affine, device, dtype)
        self.phi = nn.Parameter(torch.zeros_like(self.mean))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        mean, var = self.mean, self.var
        if self.training:
            a = torch.sigmoid(self.phi)
            batch_mean, batch_var = batch_moments(x)
            mean = (1 - a) * mean + a * batch_mean
            var = (1 - a) * var + a * batch_var
        return self.normalized(x, mean, var)
