"""ANFR: standardized filters and channel attention in place of normalization layers."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change, swap_convolutions
from fednorms.layers.channel_attention import attend
from fednorms.layers.scaled_ws import WSConv2d


@part("anfr")
class ANFR(Part):
    """Standardize filters as wsconv does, and replace norms by gates s = gain sigmoid(W2 relu(W1 z)) per channel.

    Paper: An Architecture Built for Federated Learning: Addressing Data Heterogeneity through Adaptive
    Normalization-Free Feature Recalibration. Siomos, Passerat-Palmbach and Tarroni. TMLR 2025.
    https://arxiv.org/abs/2410.02006 (code, which we have not read: github.com/siomvas/ANFR)

    z is the mean of a channel over positions; W1 has channels / `ratio` rows. A gate (squeeze and excitation) takes the
    place of the norm that ends each residual branch, other norms are removed; in a network without residual blocks,
    every norm becomes a gate. With gain=2, a gate of zero weights changes nothing, and the rest is "nonorm + wsconv".
    Acts on the model; no state. Combines with any aggregation.
    Divergence: the paper's networks also scale residual branches as NF-ResNets do, and start the gains of the filters
    at a constant that depends on the activation; here branches are plain and gains start at 1.

    >>> ANFR(ratio=8)
    anfr(ratio=8)
    """

    paper = "Siomos, Passerat-Palmbach and Tarroni 2025"

    ratio: int = option(16, at_least=1)
    gain: float = option(1.0, above=0.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        gates = attend(model, head, self.ratio, self.gain)
        if not gates:  # nothing was found
            return []
        return [*gates, *swap_convolutions(model, head, lambda conv, name: WSConv2d.like(conv, name=name))]
