"""FedProx: pull the local model towards the received one."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Phase, option, part
from fednorms.core.views import Context, Step


@part("fedprox")
class FedProx(Part):
    """Add mu/2 |w - w_t|^2 to the local loss, over all trainable tensors and on every step.

    Paper: Federated Optimization in Heterogeneous Networks. Li et al. MLSys 2020. https://arxiv.org/abs/1812.06127

    The paper uses mu 0.001 to 1; FedNN and GReg use 0.001. Acts on the local loss. No state, no extra communication.
    mu=0 is FedAvg bit for bit.
    In each round a client is a straggler with probability `straggler_fraction`: it stops after 1 to E epochs, all
    equally likely (with E=1, after a random number of its batches). Who straggles depends only on seed, round and the
    client's name: fedprox(mu=0, straggler_fraction=0.5) has the same stragglers, also combined with other methods.
    Divergence: FedBN's code adds the unsquared norm and skips steps, FedDC's fixes mu at 2e-4; this part follows the
    paper.

    >>> FedProx(mu=0.01)
    fedprox(mu=0.01)
    """

    paper = "Li et al. 2020"

    mu: float = option(0.001, at_least=0.0)
    straggler_fraction: float = option(0.0, at_least=0.0, at_most=1.0)

    @property
    def proximal(self) -> float:  # type: ignore[override]
        """mu, for FedNova."""
        return self.mu

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        if c.chance("straggles") >= self.straggler_fraction:
            return phases
        return [_shortened(p, c) for p in phases]

    @override
    def loss(self, s: Step) -> Tensor | float:
        return self.mu / 2 * (s.params - s.start).sqnorm() if self.mu else 0.0


def _shortened(phase: Phase, c: Context) -> Phase:
    done = c.chance("straggler's work")
    if phase.steps:
        return replace(phase, steps=1 + int(done * phase.steps))
    if phase.epochs and phase.epochs > 1:
        return replace(phase, epochs=1 + int(done * phase.epochs))
    return replace(phase, epochs=None, steps=1 + int(done * math.ceil(c.samples / c.batch_size)))
