"""Weight normalization of FedNN: every filter of a convolution has mean 0 and variance 1.

Paper: FedNN: Federated learning on concept drift data using weight and adaptive group normalizations. Kang et al.
Pattern Recognition 149, 2024. https://doi.org/10.1016/j.patcog.2023.110230
Paper: Micro-Batch Training with Batch-Channel Normalization and Weight Standardization. Qiao et al. arXiv 2019.
https://arxiv.org/abs/1903.10520
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor, nn

from fednorms.layers.convolution import PaddingMode, StandardizedConv2d, geometry
from fednorms.layers.replacement import place

Variant = Literal["paper", "author"]


def weight_norm(weight: Tensor, variant: Variant = "paper", eps: float = 1e-5) -> Tensor:
    """Each filter of `weight` (out, ...) with its mean subtracted and divided by its standard deviation.

    paper: (w - mean) / sqrt(biased variance + eps).
    author (public code): (w - mean) / (sample deviation + eps).
    Other papers call it "weight standardization".

    >>> w = weight_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    >>> w
    tensor([[-1.,  1.]])
    """
    axes = tuple(range(1, weight.dim()))
    mean = weight.mean(dim=axes, keepdim=True)
    if variant == "paper":
        var = weight.var(dim=axes, correction=0, keepdim=True)
        return (weight - mean) / torch.sqrt(var + eps)
    return (weight - mean) / (weight.std(dim=axes, correction=1, keepdim=True) + eps)


class WNConv2d(StandardizedConv2d):
    """Conv2d with weight-normalized filters: y = conv(x, weight_norm(w)) + b, state-dict keys of Conv2d.

    The gradient flows through mean and deviation; the bias is unchanged.

    >>> conv = WNConv2d.like(nn.Conv2d(3, 4, 3))
    >>> sorted(conv.state_dict())
    ['bias', 'weight']
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        variant: Variant = "paper",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.variant: Variant = variant
        self.eps = eps

    @classmethod
    def like(cls, conv: nn.Conv2d, variant: Variant = "paper", eps: float = 1e-5, name: str = "") -> Self:
        """The same convolution (the same Parameter objects) with weight-normalized filters."""
        new = cls(**geometry(conv, name), dtype=place(conv)["dtype"], variant=variant, eps=eps)
        return new._take(conv)

    def effective_weight(self) -> Tensor:
        """The weight-normalized filters."""
        return weight_norm(self.weight, self.variant, self.eps)

    def extra_repr(self) -> str:
        """Geometry and variant."""
        return f"{super().extra_repr()}, variant={self.variant!r}"
