"""WS: weight standardization of convolutions, before a normalization layer."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.part import Part, part
from fednorms.core.surgery import Change, swap_convolutions
from fednorms.layers.weight_norm import WNConv2d


@part("ws")
class WeightStandardization(Part):
    """Convolve with (W - mean_i) / (std_i + 1e-5) per filter i, std with divisor m - 1, m the fan-in; no gain.

    Paper: Micro-Batch Training with Batch-Channel Normalization and Weight Standardization. Qiao et al. arXiv 2019.
    https://arxiv.org/abs/1903.10520

    The same as wn(variant="author"), for convolutions followed by a normalization layer ("ws + gn"). A standardized
    filter has squared norm m - 1, wsconv's has (m - 1) / m times its gain squared. Acts on the model; what is stored
    and averaged is W. No state, no extra communication.

    >>> WeightStandardization()
    ws
    """

    paper = "Qiao et al. 2019"

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        def make(conv: nn.Conv2d, name: str) -> nn.Module:
            return WNConv2d.like(conv, variant="author", name=name)

        return swap_convolutions(model, head, make)
