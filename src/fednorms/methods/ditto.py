"""Ditto: a second, personal model per client that is pulled towards the global one."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.views import Step


@part("ditto")
class Ditto(Part):
    """Train FedAvg's model as usual and a personal v_k on F_k(v) + lam/2 |v - w|^2, w the received model.

    Paper: Ditto: Fair and Robust Federated Learning Through Personalization. Li et al. ICML 2021.
    https://arxiv.org/abs/2012.04221

    v <- v - eta (grad F_k(v) + lam (v - w)), for as many steps and over the same batches as the global model. The paper
    uses lam 0.1, 1 and 2; lam=0 is every client on its own. The pull acts on trained tensors, not on statistics; other
    parts' gradient corrections do not reach v. Client state: v_k, from the common first model on. It is the client's
    personal model; a client that never trained is tested with the server's. No extra communication; twice the
    computation.
    Divergence: a public port anchors v at the client's own trained copy, averages personal models and overwrites them.
    This part follows the paper.

    >>> Ditto(lam=0.1)
    ditto(lam=0.1)
    """

    paper = "Li et al. 2021 (Ditto)"

    lam: float = option(1.0, at_least=0.0)

    @override
    def twin(self, s: Step) -> Tensor | float:
        return self.lam / 2 * (s.params - s.start).sqnorm() if self.lam else 0.0
