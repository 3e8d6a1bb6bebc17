"""SiloBN: share what batch normalization learns, keep what it measures."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Eval, Part, Route, Slot, part


@part("silobn")
class SiloBN(Part):
    """Average gamma and beta of BatchNorm layers like all weights; keep running statistics and counters local.

    Paper: Siloed Federated Learning for Multi-Centric Histopathology Datasets. Andreux et al. MICCAI workshop DART/DCL
    2020. https://arxiv.org/abs/2008.07424

    Acts on routes, by module type. Client state: statistics. Sends less than FedAvg. A site that never trained
    estimates its own statistics from its unlabeled images.

    >>> SiloBN()
    silobn
    """

    paper = "Andreux et al. 2020"

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if is_batchnorm(slot.module) and slot.kind == "buffer" else Route.SHARED

    @override
    def evaluation(self) -> Eval:
        return Eval(unseen="re-estimated")
