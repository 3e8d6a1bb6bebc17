"""FedFN and FedFR: normalize or penalize the length of the features that the classifier sees."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change, swap_heads
from fednorms.core.views import Step
from fednorms.layers.unit_norm import UnitNormLinear


@part("fedfn")
class FedFN(Part):
    """Feed the classifier unit-norm features, in training and test: z = W f / |f| (+ b).

    Paper: FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning. Kim et al.
    NeurIPS workshop FL@FM 2023. https://arxiv.org/abs/2311.13267

    Acts on the model's head; the classifier's weights are not normalized and there is no temperature. No state, no
    extra communication. Use a larger learning rate.
    Divergence: the formula has no bias, the authors' personalization code has one (default).

    >>> FedFN(bias=False)
    fedfn(bias=False)
    """

    paper = "Kim et al. 2023 (FedFN)"

    bias: bool = option(True)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap_heads(
            self.name, model, head, lambda linear, name: UnitNormLinear.like(linear, bias=self.bias, name=name)
        )


@part("fedfr")
class FedFR(Part):
    """Add mu times the mean feature norm to the loss: CE + mu mean |f|_2 (not squared), with standard logits.

    Paper: FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning. Kim et al.
    NeurIPS workshop FL@FM 2023. https://arxiv.org/abs/2311.13267

    The paper's best mu is 0.005 with two classes per client, 0.05 with five. Acts on the local loss. No state, no extra
    communication. mu=0 is FedAvg bit for bit.

    >>> FedFR(mu=0.05)
    fedfr(mu=0.05)
    """

    paper = "Kim et al. 2023 (FedFN)"

    mu: float = option(0.005, at_least=0.0)

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.mu:
            return 0.0
        # The small number keeps the gradient finite where all ReLU features are zero.
        return self.mu * (s.features.flatten(1).square().sum(1) + 1e-12).sqrt().mean()
