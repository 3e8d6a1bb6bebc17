"""FedCM: every client mixes the federation's last direction into its own gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Round, Step

if TYPE_CHECKING:
    from fednorms.core.method import Method
    from fednorms.core.training import Training


@part("fedcm")
class FedCM(Part):
    """Step along v = alpha g + (1 - alpha) D, where D is the mean step of all clients in the last round.

    Paper: FedCM: Federated Learning with Client-level Momentum. Xu et al. 2021. https://arxiv.org/abs/2106.10874

    After a round, D = (w_t - w_{t+1}) / (K lr); at first D = 0. K are the local steps of an average client; with
    momentum rho, K becomes (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho), as in SCAFFOLD. The paper uses alpha=0.1. The
    mixture is clipped, as in the program of FedSpeed's authors (github.com/woodenchild95/FL-Simulator). D is the mean
    update as it reaches this part: list FedCM before parts that change the server's step.
    Acts on the gradient. Server state: D. Communication: one model more down. alpha=1 is FedAvg bit for bit.

    >>> FedCM(alpha=0.3)
    fedcm(alpha=0.3)
    """

    paper = "Xu et al. 2021"
    divides_updates = True
    needs_one_model = True

    alpha: float = option(0.1, above=0.0, at_most=1.0)

    @override
    def settled(self, method: Method, training: Training) -> Self:
        method.check_phases(self, training)
        return self

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), Tree()

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        if self.alpha == 1 or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return g
        return g * self.alpha + s.down * (1 - self.alpha)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        c = r.context
        walked = c.lr * c.effective_steps(c.mean_steps)
        return delta, c.per_rate(delta) / -walked if walked else r.mine
