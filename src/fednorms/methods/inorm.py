"""FedAvg+IN: replace batch normalization by instance normalization."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, part
from fednorms.core.surgery import Change, swap
from fednorms.layers.instance_norm import instance_norm_like


@part("inorm")
class InstanceNorm(Part):
    """Replace every BatchNorm by instance normalization with per-channel affine and no running statistics.

    Paper: Instance Normalization: The Missing Ingredient for Fast Stylization. Ulyanov, Vedaldi and Lempitsky. arXiv
    2016. https://arxiv.org/abs/1607.08022

    mu and v over the positions of each sample and channel; the same as gn with as many groups as channels. Acts on the
    model; no statistics, no state.

    >>> InstanceNorm()
    inorm
    """

    paper = "Ulyanov et al. 2016"

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: instance_norm_like(bn, name))
