"""FedSMOO: a dynamic regularizer for the models, and one for the points at which gradients are taken."""

from __future__ import annotations

import torch
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import End, Gradient, Round, Step


@part("fedsmoo")
class FedSMOO(Part):
    """Step along g' + lam (w - w_t + h_k), g' the gradient at w + p, p = rho d / |d| with d = g - mu_k - s.

    Paper: Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global Consistency and
    Smooth Landscape. Sun et al. ICML 2023. https://arxiv.org/abs/2305.11584 (code:
    github.com/woodenchild95/FL-Simulator)

    After every step mu_k <- mu_k + p - s; then the server's s becomes rho m / |m|, m the mean mu_k of the round's
    clients. h_k <- h_k + w_k - w_t, and the server moves to mean(w_k) + the mean h_k of all clients, as in fedspeed:
    rho=0 is fedspeed(rho=0). Acts on the gradient, with two passes per step, and on the server's step. Client state:
    h_k and mu_k. Server state: s and the mean h_k. Communication: one model more each way than FedAvg.
    Divergence: as in the program, s leaves out the mean of the last p; of the two passes only the one at w records
    running statistics.

    >>> FedSMOO(rho=0.05)
    fedsmoo(rho=0.05)
    """

    paper = "Sun et al. 2023 (FedSMOO)"
    weighting = "uniform"
    uses_even_mean = True
    uploads = True
    reduction = "uniform"
    writes_state = True

    lam: float = option(0.1, above=0.0)
    rho: float = option(0.1, at_least=0.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return join(s=w.zeros(), h=w.zeros()), join(mu=w.zeros(), h=w.zeros())

    @override
    def down(self, mine: Tree) -> Tree:
        return branch(mine, "s")

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        if not self.rho or s.context.evaluating:  # fine-tuning is plain training
            return gradf
        mu, moved = branch(s.mine, "mu"), False

        def smoothed(w: Tree, draw: int) -> Tree:
            nonlocal moved
            d = gradf(w, draw) - mu - s.down
            p = d * (self.rho / (d.sqnorm().sqrt() + 1e-7))
            if not moved:  # another part may ask for more gradients in one step
                with torch.no_grad():
                    for name, step in (p - s.down).pick(mu).items():
                        mu[name].add_(step)
            moved = True
            return gradf(w.detach() + p, draw)

        return smoothed

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        return g if s.context.evaluating else g + (branch(s.mine, "h") - s.start) * self.lam

    @override
    def decay(self, s: Step) -> Tree:
        return Tree() if s.context.evaluating else s.params.pick(branch(s.mine, "h")) * self.lam

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        mu = branch(e.mine, "mu")
        return join(mu=mu, h=branch(e.mine, "h") + e.delta), mu

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        h = branch(r.mine, "h") + r.even * (r.sampled / r.total)
        return delta + h, join(s=r.up * (self.rho / (r.up.sqnorm().sqrt() + 1e-7)), h=h)
