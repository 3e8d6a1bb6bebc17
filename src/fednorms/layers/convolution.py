"""The base of the two weight-standardizing convolutions: nn.Conv2d whose weight is changed before use."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.layers.replacement import keep_parameters, named, refuse_other_forward

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def pad_same(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Pad with zeros so that a convolution yields ceil(size / stride) positions (TensorFlow's "SAME").

    >>> pad_same(torch.zeros(1, 1, 5, 5), (3, 3), (2, 2), (1, 1)).shape
    torch.Size([1, 1, 7, 7])
    """
    pads: list[int] = []
    # F.pad counts from the last axis backwards.
    for size, k, s, d in reversed(list(zip(x.shape[-2:], kernel, stride, dilation, strict=True))):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads) if any(pads) else x


class StandardizedConv2d(nn.Conv2d):
    """A Conv2d that convolves with `effective_weight()` instead of its stored weight.

    The stored (and averaged) tensor is always the raw weight, so state-dict keys and shapes are those of Conv2d.

    >>> conv = StandardizedConv2d(1, 1, 3)
    >>> x = torch.ones(1, 1, 3, 3)
    >>> torch.equal(conv(x), nn.functional.conv2d(x, conv.weight, conv.bias))
    True
    """

    # timm's Conv2dSame pads by the size of its input; a replacement of one must do the same.
    same_padding: bool = False

    def effective_weight(self) -> Tensor:
        """The weight actually convolved with."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the effective weight."""
        if self.same_padding:
            input = pad_same(input, self.kernel_size, self.stride, self.dilation)
        return self._conv_forward(input, self.effective_weight(), self.bias)

    def folded(self, dims: int) -> nn.Module:
        """A plain convolution with the effective weight."""
        kind: type[nn.Conv2d] = nn.Conv2d
        if self.same_padding:  # a network of timm
            from timm.layers import Conv2dSame

            kind = Conv2dSame
        new = kind(**_sizes(self), device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(self.effective_weight())
            if self.bias is not None and new.bias is not None:
                new.bias.copy_(self.bias)
        return new.train(self.training)

    def _take(self, conv: nn.Conv2d) -> Self:
        self.same_padding = type(conv).__name__ == "Conv2dSame"
        keep_parameters(conv, self, "weight", "bias")
        return self


StandardisedConv2d = StandardizedConv2d  # the name of version 0.1


def geometry(conv: nn.Conv2d, name: str = "") -> dict[str, Any]:
    """The constructor arguments that rebuild a convolution's geometry, on the meta device: no numbers are drawn.

    >>> geometry(nn.Conv2d(2, 4, 3, stride=2))["stride"]
    (2, 2)
    """
    if type(conv).__name__ != "Conv2dSame":
        refuse_other_forward(conv, nn.Conv2d, name)
    if conv.weight[0].numel() == 1:
        raise BadInput(
            f"{named(name)}: standardizing one weight per filter leaves only zeros; expected a convolution with a "
            f"fan-in of at least 2, got weight shape {tuple(conv.weight.shape)}. Choose another model or leave out the "
            "part."
        )
    return {**_sizes(conv), "device": "meta"}


def _sizes(conv: nn.Conv2d) -> dict[str, Any]:
    return {
        "in_channels": conv.in_channels,
        "out_channels": conv.out_channels,
        "kernel_size": conv.kernel_size,
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "bias": conv.bias is not None,
        "padding_mode": conv.padding_mode,
    }
