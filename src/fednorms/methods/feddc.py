"""FedDC: each client trains around a global model corrected by its drift; the server undoes the mean drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import End, Round, Step

if TYPE_CHECKING:
    from fednorms.core.method import Method
    from fednorms.core.training import Training


@part("feddc")
class FedDC(Part):
    """Add alpha_i/2 |w - (w_t - h_i)|^2 + <w, c/u_i - c_i> to the local loss, alpha_i = alpha / u_i.

    Paper: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction. Gao et al. CVPR 2022.
    https://arxiv.org/abs/2203.11751

    u_i = n_i N / n is a client's relative size. After K steps with rate lr, the drift is h_i <- h_i + w - w_t and the
    control variate c_i <- c_i - c/u_i - (w - w_t) / (K lr). The server keeps H, the mean drift of all clients, moves to
    mean(w_i) + H, and c <- c + 1/N sum u_i (change of c_i). The paper uses alpha 0.01 for CIFAR and 0.1 for MNIST. Acts
    on the local loss, over the tensors that are shared, and on the server's step; statistics are averaged. Client
    state: h_i and c_i. Server state: H and c. Communication: one model more each way than FedAvg.
    Divergence: the gradient term is that of the authors' program, which accumulates as SCAFFOLD does; the text uses
    only the last update. variant="author" also divides by the first round's rate and by an average client's steps, E
    ceil(mean n / B), as the program does; the default divides by the current rate and steps.

    >>> FedDC(alpha=0.1)
    feddc(alpha=0.1)
    """

    paper = "Gao et al. 2022"
    uploads = True
    weighting = "uniform"
    reduction = "uniform"
    uses_even_mean = True
    divides_updates = True

    alpha: float = option(0.01, at_least=0.0)
    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def settled(self, method: Method, training: Training) -> Self:
        method.check_phases(self, training)
        return self

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return join(H=w.zeros(), c=w.zeros()), join(h=w.zeros(), c=w.zeros())

    @override
    def down(self, mine: Tree) -> Tree:
        return branch(mine, "c")

    @override
    def loss(self, s: Step) -> Tensor | float:
        if s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        u, w = s.context.relative, s.params.pick(s.down)
        linear = w.dot(s.down / u - branch(s.mine, "c"))
        if not self.alpha:
            return linear
        return self.alpha / u / 2 * (w - s.start + branch(s.mine, "h")).sqnorm() + linear

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        author, c, u = self.variant == "author", branch(e.mine, "c"), e.context.relative
        rate, steps = (e.context.lr_0, e.context.mean_steps) if author else (e.context.lr, e.effective_steps)
        delta = e.delta.pick(c)
        new = c - e.down / u - e.context.per_rate(delta) / (steps * rate) if rate else c
        return join(h=branch(e.mine, "h") + delta, c=new), (new - c) * u

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        share = r.sampled / r.total
        drift = branch(r.mine, "H") + r.even * share
        return delta + drift, join(H=drift, c=branch(r.mine, "c") + r.up * share)
