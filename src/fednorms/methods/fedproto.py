"""FedProto: clients exchange the mean feature of every class, and no weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Eval, Part, Pass, Route, Slot, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Context, Local, Round, Step


def to_prototypes(features: Tensor, y: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Mean over batch and dimensions of (f - C^y)^2, 0 for samples whose class has no prototype.

    >>> f, p = torch.tensor([[1.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    >>> to_prototypes(f, torch.tensor([0]), p, torch.ones(1)).item()
    2.0
    """
    return ((features - prototypes[y]).square().mean(1) * known[y]).mean()


@part("fedproto")
class FedProto(Part):
    """Pull features to the global prototype of their class: CE + lam mean (f - C^y)^2; models stay local.

    Paper: FedProto: Federated Prototype Learning across Heterogeneous Clients. Tan et al. AAAI 2022.
    https://arxiv.org/abs/2105.00243

    After training, in evaluation mode, a client sums its features per class; the server's C^j is their mean over all
    samples (`weights="uniform"`: over clients that have the class). A class that nobody sent this round keeps its last
    prototype. Tests predict the nearest prototype among the client's own classes, or use its classifier
    (`predict="head"`). Acts on the loss; every tensor is local. Client state: its model. Communication: classes x
    (features + 1) numbers each way, no weights.
    Divergence: the code collects prototypes while weights change and averages clients uniformly; this part follows the
    paper.

    >>> FedProto(lam=0.1)
    fedproto(lam=0.1)
    """

    paper = "Tan et al. 2022"
    uploads = True
    tells_class_counts = True
    never_negative = ("count",)
    counts_images = ("count",)
    keeps_all_local = True

    lam: float = option(1.0, at_least=0.0)
    weights: Literal["count", "uniform"] = option("count", choices=("count", "uniform"))
    predict: Literal["prototype", "head"] = option("prototype", choices=("prototype", "head"))

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL

    @override
    def path(self, c: Context) -> bool:
        return bool(self.lam) and c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.path[self.name] or not s.down:  # nothing was sent before the first round
            return 0.0
        return self.lam * to_prototypes(s.features.flatten(1), s.y, s.down["prototype"], s.down["known"])

    @override
    def passes(self) -> list[Pass]:
        return [Pass("after", self._collect, self._pool, reduce="sum")]

    def _collect(self, local: Local) -> tuple[Tree, Tree]:
        total, count = torch.zeros(()), torch.zeros(())
        for f, y in local.features():
            member = torch.nn.functional.one_hot(y, local.classes).to(f)
            total, count = total.to(f) + member.T @ f, count.to(f) + member.sum(0)
        own = (count > 0).to(count)
        if self.weights == "uniform":
            total, count = total / count.clamp(min=1).unsqueeze(1), own
        return Tree(own=own), Tree(sum=total, count=count)

    def _pool(self, up: Tree, r: Round) -> Tree:
        count = up["count"].unsqueeze(1)
        new = Tree(prototype=up["sum"] / count.clamp(min=1), known=(up["count"] > 0).to(up["count"]))
        if not r.mine:
            return new
        return Tree(
            prototype=torch.where(count > 0, new["prototype"], r.mine["prototype"]),
            known=torch.maximum(new["known"], r.mine["known"]),
        )

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def evaluation(self) -> Eval:
        return Eval(predict=_nearest if self.predict == "prototype" else None)


def _nearest(logits: Tensor, features: Tensor, down: Tree, mine: Tree) -> Tensor:
    """Minus the squared distance to each prototype; classes that are not the client's own are never the answer."""
    if not down:
        return logits
    score = -torch.cdist(features.flatten(1), down["prototype"]).square()
    allowed = down["known"] * mine.get("own", down["known"])
    never = score.amin(1, keepdim=True) - 20.0
    return torch.where(allowed.any(), torch.where(allowed > 0, score, never), logits)
