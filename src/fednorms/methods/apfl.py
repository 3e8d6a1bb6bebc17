"""APFL: a personal model that is mixed with the global one, by a share that may be learned."""

from __future__ import annotations

import torch
from typing_extensions import override

from fednorms.core.part import Eval, Part, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Gradient, Step, Weights


@part("apfl")
class APFL(Part):
    """Train FedAvg's w as usual, and v by v <- v - eta alpha grad F(alpha v + (1 - alpha) w) in the same steps.

    Paper: Adaptive Personalized Federated Learning. Deng et al. arXiv 2020. https://arxiv.org/abs/2003.13461 (code of
    others: github.com/lgcollins/FedRep, github.com/MLOPTPSU/FedTorch)

    adaptive=True also learns each client's share: alpha <- clip(alpha - eta <v - w, grad F(alpha v + (1 - alpha) w)>)
    to [0, 1] in every step. Plain gradient steps at the round's rate move v and alpha, whichever optimizer moves w. A
    client is tested with alpha v + (1 - alpha) w of the newest w; running statistics are the server's. Acts on the
    gradient, with two passes per step. Client state: v and alpha, at first the received model and the option. No extra
    communication. The server's model is FedAvg's, bit for bit; alpha=1 is every client on its own.
    Divergence: one program mixes the outputs of the two networks and updates alpha once per round, with a penalty of
    0.01 alpha^2; another mixes with shares alpha and alpha, which is the paper's mixture for alpha=0.5 only.

    >>> APFL(alpha=0.25)
    apfl(alpha=0.25)
    """

    paper = "Deng et al. 2020"
    writes_state = True

    alpha: float = option(0.5, at_least=0.0, at_most=1.0)
    adaptive: bool = option(False)

    @override
    def init(self, w: Weights) -> tuple[Tree, Tree]:
        like = next(iter(w.values()), torch.zeros(1)).flatten()[:1].sum()
        return Tree(), Tree({**join(v=w), "alpha": torch.full_like(like, self.alpha)})

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        if s.context.evaluating:  # fine-tuning is plain training
            return gradf

        moved = False

        def both(w: Tree, draw: int) -> Tree:
            nonlocal moved
            g, here, v, alpha = gradf(w, draw), w.detach(), branch(s.mine, "v"), s.mine["alpha"]
            if moved:  # another part may ask for more gradients in one step
                return g
            moved = True
            mixed = gradf(Tree({**here, **_mixed(here, s.mine)}), draw)
            with torch.no_grad():
                slope = (v - here).dot(mixed)
                for name, step in (mixed.pick(v) * alpha * s.context.lr).items():
                    v[name].sub_(step)
                if self.adaptive:
                    alpha.sub_(s.context.lr * slope).clamp_(0, 1)
            return g

        return both

    @override
    def evaluation(self) -> Eval:
        return Eval(personal_model=_mixed)


def _mixed(model: Tree, mine: Tree) -> Tree:
    """The mixture alpha v + (1 - alpha) w."""
    v, alpha = branch(mine, "v"), mine["alpha"]
    return v * alpha + model.pick(v) * (1 - alpha)
