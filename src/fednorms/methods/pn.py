"""PN: population normalization, experimental."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change, swap
from fednorms.layers.population_norm import PopulationNorm


@part("pn")
class PN(Part):
    """EXPERIMENTAL: normalize with a mean and a variance that are trained instead of measured.

    Paper: Population Normalization for Federated Learning. Wang et al. CVPR 2025.
    https://openaccess.thecvf.com/content/CVPR2025/html/Wang_Population_Normalization_for_Federated_Learning_CVPR_2025_paper.html

    y = gamma (x - mu) / sqrt(exp(s) + eps) + beta, mu and s parameters that are trained by the local loss and averaged
    like all others. We know only the abstract of the paper: the parametrization and the noise law are ours, and no
    published number is claimed. Acts on the model; a sample's output never depends on its batch, so batches of one
    work; no statistics, no state. noise > 0 trains with mu (1 + noise xi), xi standard normal per channel and step.

    >>> PN(noise=0.1)
    pn(noise=0.1)
    """

    paper = "Wang et al. 2025 (PN; abstract only, experimental)"

    noise: float = option(0.0, at_least=0.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: PopulationNorm.like(bn, self.noise, name))
