"""FedACG: clients start from where the server's momentum will carry the model."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Eval, Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Round, Step


@part("fedacg")
class FedACG(Part):
    """Send w + lam m, train with beta/2 |w - (w_t + lam m)|^2 added; m <- lam m + mean(update), w <- mean of models.

    Paper: Communication-Efficient Federated Learning with Accelerated Client Gradient. Kim et al. CVPR 2024.
    https://arxiv.org/abs/2201.03172 (code: github.com/geehokim/FedACG)

    An update is the way from the sent model. So w_{t+1} = w_t + m_{t+1}, and clients look ahead by lam m_{t+1}. The
    server's state is the model that is sent; tests use w. The authors' values are lam=0.85, beta=0.001 (0.01 with few
    clients). Acts on the local loss and the server's step; statistics are averaged. Server state: m. No extra
    communication. lam=0 is FedProx, and with beta=0 FedAvg, bit for bit.
    Divergence: the program also carries running statistics along the momentum.

    >>> FedACG(lam=0.9)
    fedacg(lam=0.9)
    """

    paper = "Kim et al. 2024"

    lam: float = option(0.85, at_least=0.0, at_most=1.0)
    beta: float = option(0.001, at_least=0.0)

    @property
    def proximal(self) -> float:  # type: ignore[override]
        """The pull to the sent model, for FedNova."""
        return self.beta

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), Tree()

    @override
    def loss(self, s: Step) -> Tensor | float:
        return self.beta / 2 * (s.params - s.start).sqnorm() if self.beta else 0.0

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        m = r.mine * self.lam + delta
        return delta + m * self.lam if self.lam else delta, m

    @override
    def evaluation(self) -> Eval:
        return Eval(server_model=self._without_look_ahead) if self.lam else Eval()

    def _without_look_ahead(self, model: Tree, mine: Tree) -> Tree:
        return Tree({**model, **(model.pick(mine) - mine * self.lam)})
