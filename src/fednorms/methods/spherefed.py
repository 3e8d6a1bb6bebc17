"""SphereFed: unit-norm features with a fixed orthonormal classifier."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.surgery import Change, swap_heads
from fednorms.core.views import Step
from fednorms.layers.unit_norm import UnitNormLinear


@part("spherefed")
class SphereFed(Part):
    """Fix the head to orthonormal rows shared by all clients, normalize features, train only the body.

    Paper: SphereFed: Hyperspherical Federated Learning. Dong et al. ECCV 2022. https://arxiv.org/abs/2207.09413

    z = W f / |f| with W W^T = I, no bias. Loss "ce": cross-entropy of temperature * z; "mse": the squared error to the
    one-hot label, mean over batch and classes (mse_reduction="sum_over_classes" sums over classes). Acts on the head
    and the loss. No state; the head is sent once. Needs at least as many features as classes.
    Divergence: the best rates for MSE differ widely between the original and FedFN's re-runs; the cause is unknown.

    >>> SphereFed(loss_kind="ce", temperature=15.0)
    spherefed(loss_kind='ce', temperature=15.0)
    """

    paper = "Dong et al. 2022"

    loss_kind: Literal["mse", "ce"] = option("mse", choices=("mse", "ce"))
    temperature: float = option(1.0, above=0.0)
    mse_reduction: Literal["mean", "sum_over_classes"] = option("mean", choices=("mean", "sum_over_classes"))

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        def make(linear: nn.Linear, name: str) -> nn.Module:
            if linear.in_features < linear.out_features:
                raise BadInput(
                    f"spherefed: {linear.out_features} orthonormal rows do not fit {linear.in_features} features "
                    f'(head "{name}"). Choose a model with at least as many features as classes.'
                )
            new = UnitNormLinear.like(linear, bias=False, name=name)
            with torch.no_grad():
                new.weight.copy_(torch.linalg.qr(linear.weight.detach().double().T)[0].T)
            return new

        return swap_heads(self.name, model, head, make)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.FROZEN if slot.head else Route.SHARED

    @override
    def objective(self, s: Step) -> Tensor:
        if self.loss_kind == "ce":
            return nn.functional.cross_entropy(self.temperature * s.logits, s.y)
        error = (s.logits - nn.functional.one_hot(s.y, s.logits.shape[1])).square()
        return error.mean() if self.mse_reduction == "mean" else error.sum(1).mean()
