"""Normalization only with given statistics; the layer also measures its input (FBN).

Paper: Overcoming the Challenges of Batch Normalization in Federated Learning. Guerraoui et al. arXiv 2024.
https://arxiv.org/abs/2405.14670
"""

from __future__ import annotations

import torch
from torch import Tensor

from fednorms.core.moments import batch_moments
from fednorms.core.norms import Statistics, norm_layer
from fednorms.layers.given_norm import GivenNorm


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
class GlobalNorm(GivenNorm):
    """Normalize with `mean` and `var` as constants, both in training and in evaluation.

    y = gamma (x - mean) / sqrt(var + eps) + beta. In training the layer also merges the moments of its inputs into
    `seen_mean`, `seen_var` (biased) and `seen` (a number of values); it never uses them. With `sampling` off and
    `training` on (a test with batch statistics) it normalizes with the batch instead.

    >>> layer = GlobalNorm(2)
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    >>> torch.allclose(layer(x), x, atol=1e-4), layer.seen_mean.tolist(), layer.seen_var.tolist()
    (True, [2.0, 4.0], [1.0, 4.0])
    """

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
        super().__init__(channels, eps, affine, device, dtype)
        self.sampling: bool | None = True
        self.register_buffer("seen", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("seen_mean", torch.zeros_like(self.mean))
        self.register_buffer("seen_var", torch.zeros_like(self.mean))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        mean, var = self.mean, self.var
        if self.training and self.sampling is not False:
            self._measure(x)
        elif self.training:
            mean, var = batch_moments(x)
        return self.normalized(x, mean, var)

    @torch.no_grad()
    def _measure(self, x: Tensor) -> None:
        batch_mean, batch_var = (t.to(self.mean.dtype) for t in batch_moments(x.detach()))
        n = x.numel() // x.shape[1]
        found = merged_moments(self.seen_mean, self.seen_var, self.seen, batch_mean, batch_var, n)
        for ours, new in zip((self.seen_mean, self.seen_var, self.seen), found, strict=True):
            ours.copy_(new)
