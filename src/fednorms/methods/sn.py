"""SN: switchable normalization."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change, swap
from fednorms.layers.switchable_norm import SwitchableNorm


@part("sn")
class SN(Part):
    """Let every normalization layer learn how much instance, layer and batch statistics it uses.

    Paper: Differentiable Learning-to-Normalize via Switchable Normalization. Luo et al. ICLR 2019.
    https://arxiv.org/abs/1806.10779

    mu = sum w_k mu_k and v = sum w'_k v_k over k in {IN, LN, BN}, w and w' two softmaxes of three logits each. FedNN
    compares with it. Acts on the model; statistics of the batch branch are averaged; no state; six numbers per layer
    more to send.
    Divergence: the public code computes instance variances with divisor HW - 1 (default); biased=True uses HW, which
    makes one-hot weights exactly IN, LN or BN. Running variances start at 0, as in the code; statistics that a
    pretrained BatchNorm has gathered are kept.

    >>> SN(biased=True)
    sn(biased=True)
    """

    paper = "Luo et al. 2019"

    biased: bool = option(False)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: SwitchableNorm.like(bn, self.biased, name))
