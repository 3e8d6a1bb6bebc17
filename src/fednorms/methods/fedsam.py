"""FedSAM: clients minimize the largest loss in a small neighborhood of their weights."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from fednorms.core.part import Part, Slot, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Gradient, Step


@part("fedsam")
class FedSAM(Part):
    """Take every gradient at w + rho g / |g|, where g is the gradient at w on the same batch.

    Paper: Generalized Federated Learning via Sharpness Aware Minimization. Qu et al. ICML 2022.
    https://arxiv.org/abs/2206.02618
    Paper: Improving Generalization in Federated Learning by Seeking Flat Minima. Caldarola et al. ECCV 2022.
    https://arxiv.org/abs/2203.11834 (code: github.com/debcaldarola/fedsam)

    kind="asam" is the second paper's FedASAM: with T = |w| + eta for the layers' weights and T = 1 for the rest, the
    gradient is taken at w + rho T^2 g / |T g|. Acts on the gradient, with two passes per step. No state, no extra
    communication. "fedsam + fedcm" is MoFedSAM of the first paper. rho=0 is FedAvg bit for bit.
    Divergence: only the pass at w records running statistics; the public programs record both passes.

    >>> FedSAM(rho=0.05)
    fedsam(rho=0.05)
    """

    paper = "Qu et al. 2022"

    rho: float = option(0.1, at_least=0.0)
    kind: Literal["sam", "asam"] = option("sam", choices=("sam", "asam"))
    eta: float = option(0.01, at_least=0.0)

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        if not self.rho or s.context.evaluating:  # fine-tuning is plain training
            return gradf

        def sharpest(w: Tree, draw: int) -> Tree:
            g, here = gradf(w, draw), w.detach()
            return gradf(here + self._ascent(g, here, s), draw)

        return sharpest

    def _ascent(self, g: Tree, w: Tree, s: Step) -> Tree:
        if self.kind == "asam":
            sizes = w.pick(s.context.names(_is_weight)).map(lambda t: t.abs() + self.eta)
            g = Tree({k: t * sizes[k] if k in sizes else t for k, t in g.items()})
            length = g.sqnorm().sqrt() + 1e-12
            g = Tree({k: t * sizes[k] if k in sizes else t for k, t in g.items()})
        else:
            length = g.sqnorm().sqrt() + 1e-12
        return g * (self.rho / length)


def _is_weight(slot: Slot) -> bool:
    return slot.leaf == "weight"
