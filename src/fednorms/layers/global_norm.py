"""Normalization only with given statistics; the layer also measures its input (FBN).

Paper: Overcoming the Challenges of Batch Normalization in Federated Learning. Guerraoui et al. arXiv 2024.
https://arxiv.org/abs/2405.14670
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.moments import affine, batch_moments, per_channel
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, norm_layer
from fednorms.layers.replacement import keep_parameters, keep_statistics, place, width


def merged_moments(
    mean: Tensor, var: Tensor, count: Tensor, batch_mean: Tensor, batch_var: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of `count` old and `n` new values together, exact and without cancellation.

    m = m_1 + d n / N, v = (count v_1 + n v_2 + d^2 count n / N) / N with d = m_2 - m_1, N = count + n (law of total
    variance).

    >>> one = torch.tensor(1.0)
    >>> [float(t) for t in merged_moments(one, 0 * one, one, 3 * one, 0 * one, 1)]
    [2.0, 1.0, 2.0]
    """
    total = count + n
    apart = batch_mean - mean
    new_var = (count * var + n * batch_var + apart.square() * (count * n / total)) / total
    return mean + apart * (n / total), new_var, total


@norm_layer(Statistics("mean", "var", samples=True))
class GlobalNorm(nn.Module):
    """Normalize with `mean` and `var` as constants, both in training and in evaluation.

    y = gamma (x - mean) / sqrt(var + eps) + beta. In training the layer also merges the moments of its inputs into
    `seen_mean`, `seen_var` (biased) and `seen` (a number of values); it never uses them. With `sampling` off and
    `training` on (a test with batch statistics) it normalizes with the batch instead.

    >>> layer = GlobalNorm(2)
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    >>> torch.allclose(layer(x), x, atol=1e-4), layer.seen_mean.tolist(), layer.seen_var.tolist()
    (True, [2.0, 4.0], [1.0, 4.0])
    """

    mean: Tensor
    var: Tensor
    seen: Tensor
    seen_mean: Tensor
    seen_var: Tensor

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
        self.sampling: bool | None = True
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if affine else None
        self.register_buffer("mean", torch.zeros_like(ones))
        self.register_buffer("var", ones.clone())
        self.register_buffer("seen", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("seen_mean", torch.zeros_like(ones))
        self.register_buffer("seen_var", torch.zeros_like(ones))

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
        if self.training and self.sampling is not False:
            self._measure(x)
        elif self.training:
            mean, var = batch_moments(x)
        y = (x - per_channel(mean, x)) * per_channel(torch.rsqrt(var + self.eps), x)
        return affine(y, self.weight, self.bias).to(x.dtype)

    @torch.no_grad()
    def _measure(self, x: Tensor) -> None:
        batch_mean, batch_var = (t.to(self.mean.dtype) for t in batch_moments(x.detach()))
        n = x.numel() // x.shape[1]
        found = merged_moments(self.seen_mean, self.seen_var, self.seen, batch_mean, batch_var, n)
        for ours, new in zip((self.seen_mean, self.seen_var, self.seen), found, strict=True):
            ours.copy_(new)

    def extra_repr(self) -> str:
        """Width and eps."""
        return f"{self.channels}, eps={self.eps}"
