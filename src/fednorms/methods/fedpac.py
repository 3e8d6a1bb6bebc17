"""FedPAC: features pulled to the federation's class means, and a classifier for each client mixed from all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Pass, Phase, option, part, sum_of_parts
from fednorms.core.simplex import smallest_form
from fednorms.core.tree import Tree, branch
from fednorms.core.views import Context, Local, Received, Round, Step

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("alignfeatures")
class AlignFeatures(Part):
    """Train the classifier, then the body with CE + lam mean (f - C^y)^2, C^y the federation's mean feature of class y.

    Paper: Personalized Federated Learning with Feature Alignment and Classifier Collaboration. Xu, Tong and Huang. ICLR
    2023. https://arxiv.org/abs/2306.11867 (code: github.com/JianXu95/FedPAC)

    First half of FedPAC. After training, in evaluation mode, a client sums its features per class; the server's C^j is
    their mean over all samples, and a class that nobody sent keeps its last one. The classifier trains for
    `head_epochs` at the rate `head_lr`, the rest for the recipe's epochs. Acts on the phases of a round and on the
    loss. Communication: classes x (features + 1) numbers each way. No client state.
    Divergence: a class whose mean nobody has sent yet adds nothing; the program pulls to the client's own mean then.

    >>> AlignFeatures(lam=0.5)
    alignfeatures(lam=0.5)
    """

    paper = "Xu, Tong and Huang 2023"
    uploads = True
    tells_class_counts = True
    never_negative = ("count",)
    counts_images = ("count",)

    lam: float = option(1.0, at_least=0.0)
    head_epochs: int = option(1, at_least=1)
    head_lr: float = option(0.1, above=0.0)

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        first = replace(phases[0], epochs=self.head_epochs, steps=None, train="head", lr=self.head_lr)
        return [first, *(replace(p, train="body") for p in phases)]

    @override
    def path(self, c: Context) -> bool:
        return bool(self.lam) and c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.path[self.name] or not s.down or s.context.evaluating:
            return 0.0
        apart = (s.features.flatten(1) - s.down["mean"][s.y]).square().mean(1)
        return self.lam * (apart * s.down["known"][s.y]).mean()

    @override
    def passes(self) -> list[Pass]:
        return [Pass("after", _sums, _pooled, reduce="sum")]

    @override
    def down(self, mine: Tree) -> Tree:
        return mine


@part("mixheads")
class MixHeads(Part):
    """Send client i the classifier sum_j a_ij w_j; a_i >= 0 of sum 1 minimizes a_i^T (diag(V) + D_i) a_i.

    Paper: Personalized Federated Learning with Feature Alignment and Classifier Collaboration. Xu, Tong and Huang. ICLR
    2023. https://arxiv.org/abs/2306.11867 (code: github.com/JianXu95/FedPAC)

    Second half of FedPAC. With the received model, client j measures h_j^y = p_j(y) m_j^y, its share of class y times
    the class's mean feature, and V_j = (sum_y p_j(y) E[|f|^2 | y] - |h_j^y|^2) / n_j. (D_i)_jl is the sum over y of
    (h_i^y - h_j^y) . (h_i^y - h_l^y). w_j are the classifiers of the round's clients; weights below 0.001 are left out.
    A client that did not take part, or that krum left out, keeps the classifier that it was sent last. The server's
    own, for new sites, is the plain mean. Acts on the model that each client receives. Server state: the classifiers
    sent last. Communication: classes x features numbers up. No client state.

    >>> MixHeads()
    mixheads
    """

    paper = "Xu, Tong and Huang 2023"
    uploads = True
    tells_class_counts = True
    never_negative = ("spread",)

    @override
    def missing(self, net: Net) -> str | None:
        return None if net.head_names & set(net.sent_params) else "classifier that is trained and sent"

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", _measured, _unchanged)]

    @override
    def remember(self, r: Received) -> Tree:
        names = r.context.names(lambda slot: slot.head)
        heads = [model.pick(names) for model in r.models]
        spread = torch.stack([up["spread"] for up in r.ups]).double()
        h = torch.stack([up["h"].flatten() for up in r.ups]).double()
        new = {}
        for i, client in enumerate(r.clients):
            apart = h[i] - h
            a = smallest_form(torch.diag(spread) + apart @ apart.T)
            a = torch.where(a > 1e-3, a, 0.0)
            weights = (a / a.sum()).tolist()
            for name, like in heads[i].items():
                mixed = sum(w * head[name].double() for w, head in zip(weights, heads, strict=True))
                new[f"{client}/{name}"] = torch.as_tensor(mixed).to(like)
        return Tree({**r.mine, **new})

    @override
    def model_to(self, model: Tree, mine: Tree, client: str) -> Tree:
        return Tree({**model, **branch(mine, client).pick(model)})


@sum_of_parts("fedpac")
def fedpac(lam: float = 1.0, head_epochs: int = 1, head_lr: float = 0.1) -> tuple[Part, ...]:
    """FedPAC = alignfeatures + mixheads.

    Paper: Personalized Federated Learning with Feature Alignment and Classifier Collaboration. Xu, Tong and Huang. ICLR
    2023. https://arxiv.org/abs/2306.11867 (code: github.com/JianXu95/FedPAC)

    >>> fedpac(lam=0.5)
    (alignfeatures(lam=0.5), mixheads)
    """
    return AlignFeatures(lam=lam, head_epochs=head_epochs, head_lr=head_lr), MixHeads()


def _sums(local: Local) -> tuple[Tree, Tree]:
    """The sum of a client's features per class, and their number."""
    total, count, _ = _by_class(local)
    return Tree(), Tree(sum=total, count=count)


def _pooled(up: Tree, r: Round) -> Tree:
    count = up["count"].unsqueeze(1)
    new, known = up["sum"] / count.clamp(min=1), (up["count"] > 0).to(up["count"])
    if not r.mine:
        return Tree(mean=new, known=known)
    return Tree(mean=torch.where(count > 0, new, r.mine["mean"]), known=torch.maximum(known, r.mine["known"]))


def _measured(local: Local) -> tuple[Tree, Tree]:
    total, count, squares = _by_class(local)
    n = count.sum()
    h = total / n  # p(y) times the mean of class y
    return local.mine, Tree(h=h, spread=((squares / n - h.square().sum()) / n).clamp(min=0))


def _by_class(local: Local) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of features per class, counts, and the sum of squared norms, as a test sees the training data."""
    total, count, squares = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for f, y in local.features():
        f = f.flatten(1)
        member = torch.nn.functional.one_hot(y, local.classes).to(f)
        total, count = total.to(f) + member.T @ f, count.to(f) + member.sum(0)
        squares = squares.to(f) + f.square().sum()
    return total, count, squares


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
