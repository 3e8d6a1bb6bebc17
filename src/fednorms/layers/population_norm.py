"""Population normalization: mean and variance are trained, not measured (experimental).

Paper: Population Normalization for Federated Learning. Wang et al. CVPR 2025.
https://openaccess.thecvf.com/content/CVPR2025/html/Wang_Population_Normalization_for_Federated_Learning_CVPR_2025_paper.html
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.moments import affine, per_channel
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import norm_layer, stored_statistics
from fednorms.layers.folding import plain_batchnorm
from fednorms.layers.replacement import keep_parameters, place, width


@norm_layer()
class PopulationNorm(nn.Module):
    """Normalize with a trained mean and a trained log-variance per channel.

    y = gamma (x - mu) / sqrt(exp(s) + eps) + beta, the same in training and evaluation and for each sample. In
    training, `spread` > 0 uses mu (1 + spread xi) with xi standard normal per channel and call. We know only the
    abstract of the paper: this parametrization is our own, experimental.

    >>> layer = PopulationNorm(3)
    >>> sorted(layer.state_dict())
    ['bias', 'log_var', 'mean', 'weight']
    >>> layer(torch.zeros(1, 3)).shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        channels: int,
        spread: float = 0.0,
        eps: float = 1e-5,
        stream: int = 0,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.spread, self.eps, self.stream = channels, spread, eps, stream
        zeros = torch.zeros(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.ones_like(zeros)) if affine else None
        self.bias = nn.Parameter(zeros.clone()) if affine else None
        self.mean = nn.Parameter(zeros.clone())
        self.log_var = nn.Parameter(zeros.clone())

    @classmethod
    def like(cls, norm: nn.Module, spread: float = 0.0, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine and eps, and start from its running statistics.

        Fresh statistics, 0 and 1, are mu = 0 and s = 0.
        """
        eps = float(getattr(norm, "eps", 1e-5))
        new = cls(width(norm, name), spread, eps, noise.stream(name), **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        if stored := stored_statistics(norm):
            with torch.no_grad():
                new.mean.copy_(stored[0])
                new.log_var.copy_(stored[1].clamp_min(eps).log())
        return keep_act(norm, new)

    def _xi(self, x: Tensor) -> Tensor:
        # Two uniforms give a normal (Box and Muller); always in float32, independent of the dtype.
        u = noise.uniform((2, self.channels), self.stream, x.new_empty(0, dtype=torch.float32))
        return (torch.sqrt(-2 * torch.log(u[0])) * torch.cos(2 * math.pi * u[1])).to(self.mean.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        mean: Tensor = self.mean
        if self.training and self.spread:
            mean = mean * (1 + self.spread * self._xi(x))
        y = (x - per_channel(mean, x)) * per_channel(torch.rsqrt(self.log_var.exp() + self.eps), x)
        return affine(y, self.weight, self.bias).to(x.dtype)

    def folded(self, dims: int) -> nn.Module:
        """BatchNorm with the trained statistics; the same up to rounding."""
        return plain_batchnorm(dims, self.mean, self.log_var.exp(), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Width, noise and eps."""
        return f"{self.channels}, spread={self.spread}, eps={self.eps}"
