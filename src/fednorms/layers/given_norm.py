"""The base of the layers whose mean and variance come from the server: HybridNorm and GlobalNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.moments import affine, per_channel
from fednorms.core.norm_act import keep_act
from fednorms.layers.folding import plain_batchnorm
from fednorms.layers.replacement import keep_parameters, keep_statistics, place, width


class GivenNorm(nn.Module):
    """Affine parameters, and buffers `mean` and `var` that training never changes.

    >>> layer = GivenNorm(2)
    >>> sorted(layer.state_dict())
    ['bias', 'mean', 'var', 'weight']
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
        self.register_buffer("mean", torch.zeros_like(ones))
        self.register_buffer("var", ones.clone())

    @classmethod
    def like(cls, norm: nn.Module, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine and eps, and start from its running statistics."""
        new = cls(width(norm, name), float(getattr(norm, "eps", 1e-5)), **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        keep_statistics(norm, new.mean, new.var)
        return keep_act(norm, new)

    def normalized(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalize per channel: gamma (x - mean) / sqrt(var + eps) + beta."""
        y = (x - per_channel(mean, x)) * per_channel(torch.rsqrt(var + self.eps), x)
        return affine(y, self.weight, self.bias).to(x.dtype)

    def folded(self, dims: int) -> nn.Module:
        """BatchNorm with the statistics that the server sent; the same up to rounding."""
        return plain_batchnorm(dims, self.mean, self.var, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Width and eps."""
        return f"{self.channels}, eps={self.eps}"
