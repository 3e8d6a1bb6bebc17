"""PN: population normalisation, experimental."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, option, part
from fednorms.core.surgery import Change, swap
from fednorms.layers.population_norm import PopulationNorm


@part("pn")
class PN(Part):
    """EXPERIMENTAL: normalise with a mean and a variance that are trained instead of measured.

    y = gamma (x - mu) / sqrt(exp(s) + eps) + beta, mu and s parameters that are trained by the local loss and averaged
    like all others. Paper: Population normalization for federated learning, CVPR 2025, of which we know the abstract
    only: the parametrisation and the noise law are ours, and no published number is claimed. Acts on the model;
    a sample's output never depends on its batch, so batches of one train; no statistics, no state.
    noise > 0 trains with mu (1 + noise xi), xi standard normal per channel and step.

    >>> PN(noise=0.1)
    pn(noise=0.1)
    """

    paper = "Population normalization 2025 (abstract only; experimental)"

    noise: float = option(0.0, at_least=0.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: PopulationNorm.like(bn, self.noise, name))
