"""gPerXAN: instance normalization for all, batch normalization for each, and features that the global head can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.surgery import Change, swap
from fednorms.core.views import Step
from fednorms.layers.assembled_norm import AssembledNorm

if TYPE_CHECKING:
    from fednorms.core.net import Net

SHARED = ("instance_weight", "instance_bias", "scores")


@part("gperxan")
class GPerXAN(Part):
    """Normalize by a BN(x) + (1 - a) IN(x) with local BN; add lam CE(h_t(features)), h_t the received classifier.

    Paper: Efficiently Assemble Normalization Layers and Regularization for Federated Domain Generalization. Le et al.
    CVPR 2024. https://arxiv.org/abs/2403.15605 (code: github.com/lhkhiem28/gPerXAN)

    (a, 1 - a) is a softmax of two learned scores per layer, at first 1/2 each. Scores and instance normalization are
    averaged; gain, shift and statistics of the batch normalization stay with the client. The second term keeps the
    features readable for the classifier that the server sent, which does not move. The authors use lam=0.5.
    Acts on layers, routes and the loss. Client state: its batch normalization. Sends less than FedAvg for the batch
    normalization, and 2 C + 2 numbers more per layer.
    Divergence: the authors start from a network that was pretrained with these layers. Here instance normalization
    starts with the gain and shift of the batch normalization that it joins.

    >>> GPerXAN(lam=0.1)
    gperxan(lam=0.1)
    """

    paper = "Le et al. 2024"

    lam: float = option(0.5, at_least=0.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: AssembledNorm.like(bn, name))

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if isinstance(slot.module, AssembledNorm) and slot.leaf not in SHARED else Route.SHARED

    @override
    def missing(self, net: Net) -> str | None:
        plain = len(net.heads) == 1 and type(net.module.get_submodule(net.heads[0])) is nn.Linear
        return None if plain and net.head_names <= set(net.sent_params) else "plain linear classifier that is sent"

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.lam or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        weight = next(s.start[n] for n in s.head if s.start[n].dim() == 2)
        bias = next((s.start[n] for n in s.head if s.start[n].dim() == 1), None)
        return self.lam * s.base(F.linear(s.features.flatten(1), weight, bias), s.y)
