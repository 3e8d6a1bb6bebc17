"""FedExP: extrapolate on the server when clients disagree."""

from __future__ import annotations

from typing import Literal

import torch
from typing_extensions import override

from fednorms.core.part import Eval, Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import End, Round


@part("fedexp")
class FedExP(Part):
    """Scale the mean update by eta = max(1, mean |d_k|^2 / (2 (|mean d|^2 + eps))), over all parameters as one vector.

    Paper: FedExP: Speeding Up Federated Averaging via Extrapolation. Jhunjhunwala, Wang and Joshi. ICLR 2023.
    https://arxiv.org/abs/2301.09604

    Acts on the server's update of the parameters; statistics are averaged. One number more to send. Tests use the mean
    of the last two trained global models (average_last_two); after the first round there is only one. Server state:
    the previous model.
    Divergence: variant="author" is the public code, which uses M eps (lr / lr_0)^2 for eps, M the clients of the round;
    the default is the paper's constant.

    >>> FedExP(eps=0.1)
    fedexp(eps=0.1)
    """

    paper = "Jhunjhunwala et al. 2023"
    uploads = True
    never_negative = ("sqnorm",)
    needs_plain_updates = True  # both norms are of the same d_k
    needs_one_model = True

    eps: float = option(0.001, at_least=0.0)
    average_last_two: bool = option(True)
    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        return e.mine, Tree(sqnorm=e.delta.sqnorm())

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        eps = self.eps
        if self.variant == "author" and r.context.lr_0:
            eps *= r.sampled * (r.context.lr / r.context.lr_0) ** 2
        ratio = r.up["sqnorm"] / (2 * (delta.sqnorm() + eps)) if r.up else torch.ones(())
        eta = torch.nan_to_num(ratio, nan=1.0).clamp(min=1.0)  # no movement at all: 0 / 0
        trained = r.model.pick(delta) if r.context.round else Tree()  # the model of the first round is untrained
        return delta * eta, trained

    @override
    def evaluation(self) -> Eval:
        return Eval(server_model=_middle if self.average_last_two else None)


def _middle(model: Tree, previous: Tree) -> Tree:
    now = model.pick(previous)
    return Tree({**model, **((now + previous) * 0.5 if previous else {})})
