"""FedAvgM: the server keeps a momentum of the mean updates."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Round


@part("fedavgm")
class FedAvgM(Part):
    """Keep a momentum of the mean updates on the server: v <- beta v + delta; w <- w + lr v.

    Paper: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification. Hsu, Qi and
    Brown. arXiv 2019. https://arxiv.org/abs/1909.06335

    Acts on the server's step of the parameters; statistics are averaged. Server state: v. No client state, no extra
    communication. beta=0 with lr=1 is FedAvg bit for bit.

    >>> FedAvgM(beta=0.5)
    fedavgm(beta=0.5)
    """

    paper = "Hsu et al. 2019"

    beta: float = option(0.9, at_least=0.0, at_most=1.0)
    lr: float = option(1.0, above=0.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), Tree()

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        v = r.mine * self.beta + delta if self.beta else delta
        return v if self.lr == 1 else v * self.lr, v
