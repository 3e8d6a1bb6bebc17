"""Ditto: beside the global model, a personal one that is pulled towards it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.views import Step


@part("ditto")
class Ditto(Part):
    """Train FedAvg's model as usual and a personal v_k on F_k(v) + lam/2 |v - w|^2, w the received model.

    v <- v - eta (grad F_k(v) + lam (v - w)), for as many steps and over the same batches as the global model. Paper: Li
    et al., Ditto, ICML 2021 (lam 0.1, 1, 2). Acts beside local training; the pull is on trained tensors, not on
    statistics; other parts' gradient corrections do not reach v. Client state: v_k (from the common first model on),
    which is its personal model; a client that never trained is tested with the server's. No extra communication;
    twice the computation. lam=0 is every client alone.
    Divergence: a public port anchors at the client's own trained copy, averages personal models and overwrites them;
    we follow the paper (D9).

    >>> Ditto(lam=0.1)
    ditto(lam=0.1)
    """

    paper = "Li et al. 2021 (Ditto)"

    lam: float = option(1.0, at_least=0.0)

    @override
    def twin(self, s: Step) -> Tensor | float:
        return self.lam / 2 * (s.params - s.start).sqnorm() if self.lam else 0.0
