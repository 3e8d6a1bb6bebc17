"""FedNTD: keep what the global model knows about the classes that an image does not show."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.views import Step


def others(logits: Tensor, y: Tensor) -> Tensor:
    """The logits of all classes but the true one.

    >>> others(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1])).tolist()
    [[1.0, 3.0]]
    """
    rest = torch.arange(logits.shape[1] - 1, device=y.device)
    return logits.gather(1, rest + (rest >= y.unsqueeze(1)))


@part("fedntd")
class FedNTD(Part):
    """Add beta tau^2 KL(q_t || q) to the local loss, where q is the softmax over all classes but the true one.

    Paper: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning. Lee et al. NeurIPS 2022.
    https://arxiv.org/abs/2106.03097 (code: github.com/Lee-Gihun/FedNTD)

    q belongs to the client's model and q_t to the one that it received, both with logits / tau; the mean is over the
    batch. The received model answers as in a test. The authors use beta=1, tau=1. Acts on the local loss, with a second
    pass per step. No state, no extra communication. beta=0 is FedAvg bit for bit.

    >>> FedNTD(tau=3.0)
    fedntd(tau=3.0)
    """

    paper = "Lee et al. 2022"

    beta: float = option(1.0, at_least=0.0)
    tau: float = option(1.0, above=0.0)

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.beta or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        with torch.no_grad():
            known = others(s.forward(s.start, s.x, mode="evaluate")[0], s.y) / self.tau
        q, q_t = (others(s.logits, s.y) / self.tau).log_softmax(1), known.log_softmax(1)
        return self.beta * self.tau**2 * (q_t.exp() * (q_t - q)).sum(1).mean()
