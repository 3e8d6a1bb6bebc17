"""FixBN: train normally, then freeze the global batch normalization statistics and continue."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Phase, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Context, Round

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("fixbn")
class FixBN(Part):
    """From round `switch * T` on, normalize with the global running statistics of that moment, in training and test.

    Paper: Making Batch Normalization Great in Federated Deep Learning. Zhong, Chen and Chao. NeurIPS workshop FL@FM
    2023. https://arxiv.org/abs/2303.06530

    Acts on the norm mode of the local phases. gamma, beta and all weights keep training; statistics are then constant,
    bit for bit. No state, no extra communication. switch=1 is FedAvg. Fine-tuning ("+ finetune") starts from the frozen
    statistics and updates them on the client's data, as everywhere.
    Divergence: the original also carries momentum across rounds; here that is the recipe's keep_momentum.

    >>> FixBN(switch=0.25)
    fixbn(switch=0.25)
    """

    paper = "Zhong et al. 2023"
    uses_rounds = True

    switch: float = option(0.5, at_least=0.0, at_most=1.0)

    @override
    def missing(self, net: Net) -> str | None:
        return None if any(is_batchnorm(s.module) for s in net.slots.values()) else "BatchNorm layer"

    @override
    def path(self, c: Context) -> bool:
        return c.round >= int(self.switch * c.rounds + 1e-9)  # 0.29 * 100 is slightly below 29

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        return [replace(p, norm="running") for p in phases] if self.path(c) else phases

    @override
    def stats(self, delta: Tree, r: Round) -> Tree:
        return delta.zeros() if self.path(r.context) else delta
