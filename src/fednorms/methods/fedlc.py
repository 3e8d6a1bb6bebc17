"""FedLC: calibrate logits by how many images of each class a client has."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Pass, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Round, Step


@part("fedlc")
class FedLC(Part):
    """Take the loss of the logits z_c - tau n_c^(-1/4), n_c the client's number of images of class c.

    Paper: Federated Learning with Label Distribution Skew via Logits Calibration. Zhang et al. ICML 2022.
    https://arxiv.org/abs/2209.00189 (no code of the authors; the form is that of the public ports, such as
    github.com/KarhouTam/FL-bench, which has tau=1)

    Rare classes get a larger margin, and a class that the client does not have leaves the softmax. Acts on the loss, in
    training only. Client state: n_c, counted once. No extra communication. tau=0 is FedAvg bit for bit.
    Divergence: PFLlib counts the images of all clients together, and FL-bench counts a missing class as 1e-8 images.

    >>> FedLC(tau=0.5)
    fedlc(tau=0.5)
    """

    paper = "Zhang et al. 2022"

    tau: float = option(1.0, at_least=0.0)

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", _count, _unchanged)]

    @override
    def objective(self, s: Step) -> Tensor:
        if not self.tau or not s.mine or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return s.base(s.logits, s.y)
        n = s.mine["count"]
        margin = torch.where(n > 0, self.tau * n.clamp(min=1) ** -0.25, 1e4)  # e^-10000 is 0
        return s.base(s.logits - margin, s.y)


def _count(local: Local) -> tuple[Tree, Tree]:
    """The client's number of images of each class, counted in its first round."""
    return local.mine or Tree(count=local.class_counts), Tree()


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
