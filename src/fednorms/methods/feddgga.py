"""FedDG-GA: give more weight to clients whose loss grows when models are averaged."""

from __future__ import annotations

import torch
from typing_extensions import override

from fednorms.core.part import Part, Pass, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Received, Round


@part("feddgga")
class FedDGGA(Part):
    """Weigh clients by a_k <- clip(a_k + step_t G_k / max_j |G_j|), G_k the rise of a client's loss by averaging.

    Paper: Federated Domain Generalization with Generalization Adjustment. Zhang et al. CVPR 2023.
    https://openaccess.thecvf.com/content/CVPR2023/html/Zhang_Federated_Domain_Generalization_With_Generalization_Adjustment_CVPR_2023_paper.html
    Code: github.com/MediaBrain-SJTU/FedDG-GA, which this part follows.

    G_k is the loss of the received model minus that of the client's own model when it trained last, both on its
    training data and as a test computes it. Weights start at 1/N, are clipped to [0, 1] and scaled to their sum before.
    step_t = step / N (1 - t / T) in round t of T. Weights of the first round are equal.
    Acts on the clients' weights, with one pass over the data after each round for two models. Client state: a number.
    Server state: a. Communication: one number. The server must see each update. step=0 has equal weights.
    Divergence: the program measures on each client's validation images, right after averaging, and by default compares
    accuracies; here the gap is known when a client takes part again.

    >>> FedDGGA(step=0.1)
    feddgga(step=0.1)
    """

    paper = "Zhang et al. 2023 (FedDG-GA)"
    sets_weights = True
    uploads = True
    uses_rounds = True
    reduction = "grouped"

    step: float = option(0.2, at_least=0.0)

    @override
    def passes(self) -> list[Pass]:
        return [Pass("after", _measure, _unchanged, reduce="grouped")]

    @override
    def weigh(self, r: Received) -> tuple[list[float], Tree]:
        old = [float(r.mine[k]) if k in r.mine else 1 / r.total for k in r.clients]
        gaps = [float(up["gap"]) if "gap" in up else 0.0 for up in r.ups]
        most = max(map(abs, gaps))
        c = r.context
        size = self.step / r.total * (1 - c.round / c.rounds) / most if most > 0 else 0.0
        new = [min(max(a + size * gap, 0.0), 1.0) for a, gap in zip(old, gaps, strict=True)]
        scale = sum(old) / sum(new) if sum(new) > 0 else 0.0
        new = [a * scale for a in new] if scale else old
        like = next(iter(r.model.values()), torch.zeros(()))  # a method may share no tensor
        kept = {k: like.new_tensor(a) for k, a in zip(r.clients, new, strict=True)}
        return new, Tree({**r.mine, **kept})


def _measure(local: Local) -> tuple[Tree, Tree]:
    """Keep the loss of the trained model; send that of the received one minus that of the model before."""
    own = local.test_loss(local.model)
    if "loss" not in local.mine:
        return Tree(loss=own), Tree()
    averaged = local.test_loss(Tree({**local.model, **local.kept, **local.received}))
    return Tree(loss=own), Tree(gap=averaged - local.mine["loss"])


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
