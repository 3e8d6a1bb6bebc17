"""FedSpeed: sharpness-aware steps, a proximal term, and a correction that takes its bias away."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import End, Gradient, Round, Step


@part("fedspeed")
class FedSpeed(Part):
    """Step along (1 - alpha) g + alpha g' + lam (w - w_t + h_k), g' the gradient at w + rho g / |g|.

    Paper: FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy. Sun et al.
    ICLR 2023. https://arxiv.org/abs/2302.10429 (code: github.com/woodenchild95/FL-Simulator)

    h_k <- h_k + w_k - w_t after a client's round, and -lam h_k is the paper's correction of the proximal term, whose
    lambda is 1 / lam. The server moves to mean(w_k) + the mean h_k of all clients. As in the program, lam (h_k - w_t)
    belongs to the gradient and lam w to weight decay, which is not clipped. Acts on the gradient, with two passes per
    step, and on the server's step. Client state: h_k. Server state: the mean h_k. No extra communication. For clients
    of equal size, rho=0 is feddyn(alpha=lam, form=code); alpha=1 is the program, without the gradient at w.
    Divergence: only the pass at w records running statistics; the program records both passes.

    >>> FedSpeed(rho=0.05)
    fedspeed(rho=0.05)
    """

    paper = "Sun et al. 2023 (FedSpeed)"
    weighting = "uniform"
    uses_even_mean = True

    lam: float = option(0.1, above=0.0)
    rho: float = option(0.1, at_least=0.0)
    alpha: float = option(1.0, at_least=0.0, at_most=1.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), w.zeros()

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        if not self.rho or not self.alpha or s.context.evaluating:  # fine-tuning is plain training
            return gradf

        def merged(w: Tree, draw: int) -> Tree:
            g = gradf(w, draw)
            ahead = gradf(w.detach() + g * (self.rho / (g.sqnorm().sqrt() + 1e-7)), draw)
            return ahead if self.alpha == 1 else g * (1 - self.alpha) + ahead * self.alpha

        return merged

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        return g if s.context.evaluating else g + (s.mine - s.start) * self.lam

    @override
    def decay(self, s: Step) -> Tree:
        return Tree() if s.context.evaluating else s.params.pick(s.mine) * self.lam

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        return e.mine + e.delta, Tree()

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        h = r.mine + r.even * (r.sampled / r.total)
        return delta + h, h
