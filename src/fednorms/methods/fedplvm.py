"""FedPLVM: several clustered prototypes per class and client, clustered again on the server."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from fednorms.core.clustering import cluster_means, finch
from fednorms.core.part import Part, Pass, option, part
from fednorms.core.tree import Tree, branch
from fednorms.core.views import Context, Local, Round, Step


def sparse_contrast(similarity: Tensor, positive: Tensor, valid: Tensor, alpha: float, tau: float) -> Tensor:
    """Per sample, -log(sum over positives of exp(s^alpha / tau) / the same sum over all), s clamped to [1e-4, 1].

    >>> s, valid = torch.tensor([[0.81, 0.16]]), torch.tensor([[True, True]])
    >>> [round(sparse_contrast(s, torch.tensor([[True, False]]), valid, a, 1.0).item(), 5) for a in (0.5, 1.0)]
    [0.47408, 0.42006]
    """
    sharp = similarity.clamp(1e-4, 1.0) ** alpha / tau
    every = sharp.masked_fill(~valid, -torch.inf).logsumexp(1)
    return every - sharp.masked_fill(~positive, -torch.inf).logsumexp(1)


@part("fedplvm")
class FedPLVM(Part):
    """Pull features to their class's prototypes with a contrast of cos^alpha, and to the prototypes' mean.

    Paper: Taming Cross-Domain Representation Variance in Federated Prototype Learning with Heterogeneous Data Domains.
    Wang et al. NeurIPS 2024. https://arxiv.org/abs/2403.09048
    Paper: Efficient Parameter-Free Clustering Using First Neighbor Relations. Sarfraz, Sharma and Stiefelhagen. CVPR
    2019. https://arxiv.org/abs/1902.11266

    l = CE + lam (L_con + 2 mean (cos(f, gbar^y) - 1)^2), L_con = -log(sum_{g in G^y} e^(cos(f,g)^alpha / tau) / sum_{g
    in G} e^(cos(f,g)^alpha / tau)), from the second round on. After training, in evaluation mode, each client clusters
    its features per class with FINCH; the server clusters the received means again; gbar is the mean of a class's G.
    Samples of classes without a prototype are left out. Acts on the loss and by a pass after training. Server state: G.
    Communication: prototypes up and down; uploads are lists, which rules out secure aggregation.
    Divergence: lam is 1 as in GReg's comparison, 100 in the authors' code. The clustering is our own implementation.

    >>> FedPLVM(lam=100.0)
    fedplvm(lam=100.0)
    """

    paper = "Wang et al. 2024"
    uploads = True

    lam: float = option(1.0, at_least=0.0)
    alpha: float = option(0.25, above=0.0)
    tau: float = option(0.07, above=0.0)

    @override
    def path(self, c: Context) -> bool:
        return bool(self.lam) and c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.path[self.name] or not s.down:  # nothing was sent before the first round
            return 0.0
        f, g, label = normalize(s.features.flatten(1)), s.down["prototype"], s.down["class"]
        valid = (label >= 0).expand(len(f), -1)
        own = s.y.unsqueeze(1) == label
        known = own.any(1)
        positive = torch.where(known.unsqueeze(1), own, valid)  # a term of 0 for samples that are left out
        con = sparse_contrast(f @ normalize(g).T, positive, valid, self.alpha, self.tau)
        member = positive.to(g)
        centre = normalize(member @ g / member.sum(1, keepdim=True))
        cor = 2 * ((f * centre).sum(1) - 1) ** 2
        share = known.to(f) / known.sum().clamp(min=1)
        return self.lam * ((con + cor) * share).sum()

    @override
    def passes(self) -> list[Pass]:
        return [Pass("after", self._local, self._global, reduce="list")]

    def _local(self, local: Local) -> tuple[Tree, Tree]:
        found = list(local.features())
        return local.mine, _clustered(torch.cat([f for f, _ in found]), torch.cat([y for _, y in found]))

    def _global(self, up: Tree, r: Round) -> Tree:
        clients = dict.fromkeys(name.partition("/")[0] for name in up)
        sent = [branch(up, client) for client in clients]
        if not sent:
            return r.mine
        pooled = _clustered(torch.cat([t["prototype"] for t in sent]), torch.cat([t["class"] for t in sent]))
        return _padded(pooled, 1 << (len(pooled["class"]) - 1).bit_length())

    @override
    def down(self, mine: Tree) -> Tree:
        return mine


def _clustered(x: Tensor, y: Tensor) -> Tree:
    """Per class, the means of its clusters; on the host, where sums have an order."""
    device, x, y = x.device, x.cpu(), y.cpu()
    means, labels = [], []
    for c in y.unique().tolist():
        members = x[y == c]
        means.append(cluster_means(members, finch(members)))
        labels.append(torch.full((len(means[-1]),), c, dtype=torch.int64))
    return Tree({"prototype": torch.cat(means).to(device), "class": torch.cat(labels).to(device)})


def _padded(tree: Tree, size: int) -> Tree:
    """Pad with rows of class -1: the shapes of a step then change rarely."""
    more = size - len(tree["class"])
    p = tree["prototype"]
    return Tree(
        {
            "prototype": torch.cat([p, p.new_zeros(more, p.shape[1])]),
            "class": torch.cat([tree["class"], tree["class"].new_full((more,), -1)]),
        }
    )
