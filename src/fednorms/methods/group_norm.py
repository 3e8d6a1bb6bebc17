"""FedAvg+GN and FedAvg+LN: replace batch normalization by group or layer normalization."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change, swap
from fednorms.layers.group_norm import group_norm_like, paper_groups


@part("gn")
class GroupNorm(Part):
    """Replace every BatchNorm by GroupNorm with per-channel affine parameters; nothing else changes.

    Paper: Group Normalization. Wu and He. ECCV 2018. https://arxiv.org/abs/1803.08494

    groups=0 follows FedWon's rules: the network's own table (digits-cnn: 32, 32, 64), otherwise 32 groups, 8 below 32
    channels, 24 for 144. FedNN, FedDyn and FedDC use groups=2. Acts on the model; no statistics, no state.

    >>> GroupNorm(groups=2)
    gn(groups=2)
    """

    paper = "Wu and He 2018; FedWon 2024, FedNN 2024"

    groups: int = option(0, at_least=0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        table: dict[str, int] = getattr(model, "gn_groups", {})

        def make(bn: nn.Module, name: str) -> nn.Module:
            channels = int(bn.num_features)  # type: ignore[arg-type]
            return group_norm_like(bn, self.groups or table.get(name) or paper_groups(channels), name)

        return swap(model, is_batchnorm, make)


@part("ln")
class LayerNorm(Part):
    """Replace every BatchNorm by layer normalization: one group over channels and positions, per-channel affine.

    Paper: Layer Normalization. Ba, Kiros and Hinton. arXiv 2016. https://arxiv.org/abs/1607.06450

    As in FedWon's comparison (FedAvg+LN). Acts on the model; no statistics, no state.

    >>> LayerNorm()
    ln
    """

    paper = "Ba et al. 2016; FedWon 2024"

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: group_norm_like(bn, 1, name))
