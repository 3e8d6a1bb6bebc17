"""FRN: filter response normalisation with thresholded linear units."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change
from fednorms.layers.thresholds import thresholded


@part("frn")
class FRN(Part):
    """Divide every map by its root mean square; threshold at a learnt level where a ReLU followed.

    y = gamma x / sqrt(mean x^2 + eps) + beta, z = max(y, tau), eps = 1e-6 (learn_eps=True trains it, for maps of 1x1).
    Paper: Singh and Krishnan, Filter response normalization layer, CVPR 2020; compared in FedNN 2024. Acts on the
    model; no statistics, no state; one number per channel more to send.
    Divergence: a public port thresholds after every layer; here only where an nn.ReLU module directly followed, which
    is taken out. Before an addition, or where what follows cannot be told (a functional ReLU), the layer has no
    threshold and the activation stays.

    >>> FRN(learn_eps=True)
    frn(learn_eps=True)
    """

    paper = "Singh and Krishnan 2020"

    learn_eps: bool = option(False)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return thresholded(model, self.learn_eps)
