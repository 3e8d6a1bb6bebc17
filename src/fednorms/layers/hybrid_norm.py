"""Hybrid batch normalization: a learned mixture of batch statistics and those sent by the server.

Paper: Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning. Chen et al. ICML
2025. https://arxiv.org/abs/2505.21877
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.moments import affine, batch_moments, per_channel
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, Tensors, norm_layer
from fednorms.layers.replacement import keep_parameters, keep_statistics, place, width


def _batch_only(layer: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    return {"phi": torch.full_like(tensors["phi"], torch.inf)}  # sigmoid: all weight on the batch


@norm_layer(Statistics("mean", "var", batch_only=_batch_only))
class HybridNorm(nn.Module):
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

    mean: Tensor
    var: Tensor

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if affine else None
        self.phi = nn.Parameter(torch.zeros_like(ones))
        self.register_buffer("mean", torch.zeros_like(ones))
        self.register_buffer("var", ones.clone())

    @classmethod
    def like(cls, norm: nn.Module, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine and eps, and start from its running statistics."""
        new = cls(width(norm, name), float(getattr(norm, "eps", 1e-5)), **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        keep_statistics(norm, new.mean, new.var)
        return keep_act(norm, new)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        mean, var = self.mean, self.var
        if self.training:
            a = torch.sigmoid(self.phi)
            batch_mean, batch_var = batch_moments(x)
            mean = (1 - a) * mean + a * batch_mean
            var = (1 - a) * var + a * batch_var
        y = (x - per_channel(mean, x)) * per_channel(torch.rsqrt(var + self.eps), x)
        return affine(y, self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Width and eps."""
        return f"{self.channels}, eps={self.eps}"
