"""FedLESAM: sharpness-aware steps along an estimate of the federation's own direction, without a second pass."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import End, Gradient, Step


@part("fedlesam")
class FedLESAM(Part):
    """Take every gradient at w + rho (w_old - w_t) / |w_old - w_t|.

    Paper: Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware
    Minimization. Fan et al. ICML 2024. https://arxiv.org/abs/2405.18890 (code: github.com/MediaBrain-SJTU/FedLESAM)

    w_t is the model that the client received, w_old the one that it received when it took part last: their difference
    points where the global loss rises. In a client's first round nothing is added. Acts on the gradient, with one pass
    per step. Client state: w_old. No extra communication. rho=0 is FedAvg bit for bit.
    Divergence: the public program uses the server's last update for all clients, and divides by the sum of the tensors'
    norms; this part follows the paper.

    >>> FedLESAM(rho=0.05)
    fedlesam(rho=0.05)
    """

    paper = "Fan et al. 2024"

    rho: float = option(0.1, at_least=0.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return Tree(), w  # of a client: the model that it receives first

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        if not self.rho or s.context.evaluating:  # fine-tuning is plain training
            return gradf

        def perturbed(w: Tree, draw: int) -> Tree:
            uphill = s.mine - s.start
            return gradf(w.detach() + uphill * (self.rho / (uphill.sqnorm().sqrt() + 1e-12)), draw)

        return perturbed

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        return e.start.pick(e.mine), Tree()
