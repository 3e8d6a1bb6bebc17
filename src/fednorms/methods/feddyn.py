"""FedDyn: a dynamic regularizer that makes the clients' optima agree with the global one."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import End, Round, Step


@part("feddyn")
class FedDyn(Part):
    """Add -<lambda_k, w> + alpha_k/2 |w - w_t|^2 to the local loss; then lambda_k <- lambda_k - alpha_k (w - w_t).

    Paper: Federated Learning Based on Dynamic Regularization. Acar et al. ICLR 2021. https://arxiv.org/abs/2111.04263

    alpha_k = alpha / u_k, u_k = n_k N / n the client's relative size. The server keeps h <- h - alpha |S|/N mean(w_k -
    w_t), which is the mean of all u_k lambda_k, and moves to mean(w_k) - h / alpha. The paper uses alpha 0.1, 0.01 or
    0.001; 0 is not allowed, because the server divides by it. Acts on the local loss, over the tensors that are shared,
    and on the server's step; statistics are averaged. Client state: lambda_k. Server state: h. No extra communication.
    form="code" is the authors' program: a client keeps the sum of its updates H_k = -lambda_k / alpha_k, the term is
    alpha_k <w, H_k - w_t>, the quadratic part is weight decay alpha_k, and the server adds the mean H_k of all clients.
    Both forms agree as long as nothing is clipped.
    Divergence: that weight decay is not clipped with the gradient; the default clips the whole penalty.

    >>> FedDyn(alpha=0.1)
    feddyn(alpha=0.1)
    """

    paper = "Acar et al. 2021"
    weighting = "uniform"
    uses_even_mean = True

    alpha: float = option(0.01, above=0.0)
    form: Literal["paper", "code"] = option("paper", choices=("paper", "code"))

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), w.zeros()

    @override
    def loss(self, s: Step) -> Tensor | float:
        if s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        w, alpha = s.params.pick(s.mine), self.alpha / s.context.relative
        if self.form == "code":
            return alpha * w.dot(s.mine - s.start)
        return alpha / 2 * (w - s.start).sqnorm() - w.dot(s.mine)

    @override
    def decay(self, s: Step) -> Tree:
        if self.form == "paper" or s.context.evaluating:
            return Tree()
        return s.params.pick(s.mine) * (self.alpha / s.context.relative)

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        delta = e.delta.pick(e.mine)
        return e.mine + (delta if self.form == "code" else delta * (-self.alpha / e.context.relative)), Tree()

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        moved = r.even * (r.sampled / r.total)
        if self.form == "code":
            mean_history = r.mine + moved
            return delta + mean_history, mean_history
        h = r.mine - moved * self.alpha
        return delta - h / self.alpha, h
