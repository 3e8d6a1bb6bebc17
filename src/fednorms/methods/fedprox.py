"""FedProx: pull the local model towards the broadcast one."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.part import Part, option, part
from fednorms.views import Step


@part("fedprox")
class FedProx(Part):
    """Add mu/2 |w - w_t|^2 to the local loss, over all trainable tensors and on every step.

    Paper: Li et al., Federated optimization in heterogeneous networks, MLSys 2020 (mu 0.001 to 1; FedNN, GReg: 0.001).
    Acts on the local loss. No state, no extra communication. mu=0 is FedAvg bit for bit.
    Divergence: FedBN's code adds the unsquared norm and skips steps, FedDC's fixes mu at 2e-4; we follow the paper.

    >>> FedProx(mu=0.01)
    fedprox(mu=0.01)
    """

    paper = "Li et al. 2020"

    mu: float = option(0.001, at_least=0.0)

    @override
    def loss(self, s: Step) -> Tensor | float:
        return self.mu / 2 * (s.params - s.start).sqnorm() if self.mu else 0.0
