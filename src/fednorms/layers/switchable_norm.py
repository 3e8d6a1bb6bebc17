"""Switchable normalization: every layer learns a mixture of instance, layer and batch statistics.

Paper: Differentiable Learning-to-Normalize via Switchable Normalization. Luo et al. ICLR 2019.
https://arxiv.org/abs/1806.10779
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.moments import coarser, instance_moments, rescaled
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, Tensors, norm_layer
from fednorms.layers.replacement import has_trained, keep_parameters, keep_statistics, place, width


def _measure(layer: nn.Module, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, SwitchableNorm)
    return layer.batch_statistics(x)


@norm_layer(Statistics(measure=_measure))
class SwitchableNorm(nn.Module):
    """Normalize with softmax mixtures of instance, layer and batch means and, separately, variances.

    mu = sum_k w_k mu_k, v = sum_k w'_k v_k over k = in, ln, bn in this order; w, w' = softmax of `mean_logits` and
    `var_logits`, all 1 at the start; y = gamma (x - mu) / sqrt(v + eps) + beta. Layer and batch moments are computed
    from the instance ones. The reference uses the instance variance with divisor HW - 1; `biased=True` uses HW, which
    makes one-hot weights exactly instance, layer or batch normalization. Running statistics belong to the batch branch:
    r <- keep r + (1 - keep) batch value. Inputs of shape (N, C) count as one position, whose instance variance is 0.

    >>> layer = SwitchableNorm(3)
    >>> sorted(layer.state_dict())
    ['bias', 'mean_logits', 'running_mean', 'running_var', 'var_logits', 'weight']
    >>> layer(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        biased: bool = False,
        eps: float = 1e-5,
        keep: float = 0.9,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.biased, self.eps, self.keep = channels, biased, eps, keep
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if affine else None
        self.mean_logits = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.var_logits = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", torch.zeros_like(ones))  # as in the reference

    @classmethod
    def like(cls, norm: nn.Module, biased: bool = False, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine, eps and the statistics that it has gathered."""
        new = cls(width(norm, name), biased, float(getattr(norm, "eps", 1e-5)), **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        if has_trained(norm):
            keep_statistics(norm, new.running_mean, new.running_var)
        return keep_act(norm, new)

    def batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch branch, per channel."""
        mean, var = coarser(*instance_moments(x, unbiased=not self.biased), axis=0)
        return mean[0], var[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        m_in, v_in = instance_moments(x, unbiased=not self.biased)  # (N, C)
        m_ln, v_ln = coarser(m_in, v_in, axis=1)  # (N, 1)
        if self.training:
            m_bn, v_bn = coarser(m_in, v_in, axis=0)  # (1, C)
            with torch.no_grad():
                for running, batch in ((self.running_mean, m_bn), (self.running_var, v_bn)):
                    running.mul_(self.keep).add_(batch[0].detach().to(running.dtype), alpha=1 - self.keep)
        else:
            m_bn, v_bn = self.running_mean, self.running_var
        w, u = torch.softmax(self.mean_logits, 0), torch.softmax(self.var_logits, 0)
        mean = w[0] * m_in + w[1] * m_ln + w[2] * m_bn
        var = u[0] * v_in + u[1] * v_ln + u[2] * v_bn
        scale = torch.rsqrt(var + self.eps)
        return rescaled(x, mean, scale if self.weight is None else self.weight * scale, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Width, divisor and eps."""
        return f"{self.channels}, biased={self.biased}, eps={self.eps}"
