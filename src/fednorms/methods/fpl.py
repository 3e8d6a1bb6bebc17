"""FPL: the server clusters the clients' class means; features follow the clusters of their class, and their mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from typing_extensions import override

from fednorms.core.clustering import cluster_means, finch
from fednorms.core.part import Part, Pass, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Context, Local, Round, Step


@part("fpl")
class FPL(Part):
    """Add lam (-log(sum_{g in G^y} e^(cos(f,g)/tau) / sum_{g in G} e^(cos(f,g)/tau)) + mean (f - gbar^y)^2).

    Paper: Rethinking Federated Learning with Domain Shift: A Prototype View. Huang et al. CVPR 2023.
    https://openaccess.thecvf.com/content/CVPR2023/html/Huang_Rethinking_Federated_Learning_With_Domain_Shift_A_Prototype_View_CVPR_2023_paper.html
    Code: github.com/WenkeHuang/RethinkFL, which this part follows.
    Paper: Efficient Parameter-Free Clustering Using First Neighbor Relations. Sarfraz, Sharma and Stiefelhagen. CVPR
    2019. https://arxiv.org/abs/1902.11266

    G^y are cluster means (FINCH) of the class means that the last round's clients sent for class y, gbar^y is their
    plain mean, and the second mean is over the d features. A class that only one client sent has that client's mean as
    its cluster, as in the program. Samples whose class nobody sent add 0. The authors use lam=1 and tau=0.02.
    Acts on the loss, from the second round on, and by a pass after training. Server state: G. Communication: d numbers
    per class up, and as many down for every cluster. The server must see each client's class means. lam=0 is FedAvg bit
    for bit.
    Divergence: class means are measured after training and as in a test; the program collects them in the last epoch.

    >>> FPL(tau=0.05)
    fpl(tau=0.05)
    """

    paper = "Huang et al. 2023"
    uploads = True
    never_negative = ("known",)

    lam: float = option(1.0, at_least=0.0)
    tau: float = option(0.02, above=0.0)

    @override
    def path(self, c: Context) -> bool:
        return bool(self.lam) and c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.path[self.name] or not s.down or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        f, g, valid = s.features.flatten(1), s.down["prototype"], s.down["valid"] > 0
        cosine = (normalize(f) @ normalize(g.flatten(0, 1)).T / self.tau).masked_fill(~valid.flatten(), -torch.inf)
        known = valid.any(1)[s.y]
        own = torch.where(known.view(-1, 1, 1), one_hot(s.y, len(g)).unsqueeze(2) * valid, valid).flatten(1)
        contrast = cosine.logsumexp(1) - cosine.masked_fill(~own.bool(), -torch.inf).logsumexp(1)
        centre = g.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        terms = contrast + (f - centre[s.y]).square().mean(1)
        return self.lam * (terms * known).mean()

    @override
    def passes(self) -> list[Pass]:
        return [Pass("after", _measure, _cluster, reduce="stack")]

    @override
    def down(self, mine: Tree) -> Tree:
        return mine


def _measure(local: Local) -> tuple[Tree, Tree]:
    """The mean feature of every class that the client has."""
    total, count = torch.zeros(()), torch.zeros(())
    for f, y in local.features():
        member = one_hot(y, local.classes).to(f)
        total, count = total.to(f) + member.T @ f, count.to(f) + member.sum(0)
    known = (count > 0).to(count)
    return local.mine, Tree(prototype=total / count.clamp(min=1).unsqueeze(1), known=known)


def _cluster(up: Tree, r: Round) -> Tree:
    """Per class, the means of its clusters, of which there are at most half as many as clients."""
    if not up:
        return r.mine
    sent = up["prototype"].cpu()  # on the host, where sums have an order
    clients, classes, d = sent.shape
    found, valid = sent.new_zeros(classes, max(1, clients // 2), d), sent.new_zeros(classes, max(1, clients // 2))
    for c in range(classes):
        means = sent[up["known"][:, c].cpu() > 0, c]
        means = cluster_means(means, finch(means))
        found[c, : len(means)], valid[c, : len(means)] = means, 1.0
    return Tree(prototype=found.to(up["prototype"]), valid=valid.to(up["prototype"]))
