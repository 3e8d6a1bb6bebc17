"""FRN: filter response normalization with thresholded linear units."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change
from fednorms.layers.thresholds import thresholded


@part("frn")
class FRN(Part):
    """Divide every map by its root mean square; threshold at a learned level where a ReLU followed.

    Paper: Filter Response Normalization Layer: Eliminating Batch Dependence in the Training of Deep Neural Networks.
    Singh and Krishnan. CVPR 2020. https://arxiv.org/abs/1911.09737

    y = gamma x / sqrt(mean x^2 + eps) + beta, z = max(y, tau), eps = 1e-6 (learn_eps=True trains it, for maps of 1x1).
    FedNN compares with it. Acts on the model; no statistics, no state; one number per channel more to send.
    Divergence: a public port thresholds after every layer. Here a threshold replaces only an nn.ReLU module that
    directly follows. Before an addition, or if the next operation is unknown (a functional ReLU), the layer has no
    threshold and the activation stays.

    >>> FRN(learn_eps=True)
    frn(learn_eps=True)
    """

    paper = "Singh and Krishnan 2020"

    learn_eps: bool = option(False)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return thresholded(model, self.learn_eps)
