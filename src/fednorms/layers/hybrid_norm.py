"""Hybrid batch normalisation: a learned mixture of the statistics of the batch and those sent by the
server.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.layers.carry import keep_parameters, place, tensor, width
from fednorms.layers.moments import affine, batch_moments, per_channel
from fednorms.layers.norm_act import keep_act


def raw_moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel of a layer's input (N, C, ...), and the number of values per
    channel.

    What HBN's statistics pass collects; these merge exactly over batches and clients by the law of total
    variance.

    >>> raw_moments(torch.tensor([[1.0], [3.0]]))
    (tensor([2.]), tensor([1.]), 2)
    """
    mean, var = batch_moments(x)
    return mean, var, x.numel() // x.shape[1]


class HybridNorm(nn.Module):
    """Normalise with a mixture of batch and global statistics in training, with global ones in evaluation.

    a = sigmoid(phi) per channel; mu = (1 - a) mu_g + a mu_b, v = (1 - a) v_g + a v_b (biased);
    y = gamma (x - mu) / sqrt(v + eps) + beta. HBN (ICML 2025). Gradients flow through phi and the batch
    statistics; the global statistics `mean`, `var` are constants that the layer never changes.

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
        """In place of a batch normalisation layer: keeps affine and eps, and starts from its running
        statistics.
        """
        new = cls(width(norm, name), float(getattr(norm, "eps", 1e-5)), **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        for old, ours in (("running_mean", new.mean), ("running_var", new.var)):
            tracked = tensor(norm, old)
            if tracked is not None:
                ours.copy_(tracked)
        return keep_act(norm, new)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x of shape (N, C, ...)."""
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
