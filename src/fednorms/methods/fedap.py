"""FedAP: each client gets a mixture of all models, more of those whose features are distributed like its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.moments import raw_moments
from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Pass, Route, Slot, option, part
from fednorms.core.tree import Tree, branch, join, mean
from fednorms.core.views import Local, Received, Round

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("fedap")
class FedAP(Part):
    """Send client i the model sum_j W_ij w_j, W_ii = lam and the other W_ij proportional to 1 / d_ij; keep BatchNorm.

    Paper: Personalized Federated Learning with Adaptive Batchnorm for Healthcare. Lu et al. IEEE Transactions on Big
    Data 2022. https://arxiv.org/abs/2112.00734 (code: github.com/microsoft/PersonalizedFL)

    d_ij = sum over BatchNorm layers of sqrt(|m_i - m_j|^2 + |s_i - s_j|^2), where m and s are the means and standard
    deviations per channel of what the layer gets from a client's training data under the first model: start from
    pretrained weights. w_j is the last model that client j sent; clients that have sent none are left out, and the rest
    of the row is scaled up. The server's own model, for new sites, is the plain mean.
    Acts on routes and on the model that each client receives. Client state: its BatchNorm tensors. Server state: W and
    the last model of every client. Communication: less than FedAvg, and once the statistics. lam=1 trains every client
    by itself.
    Divergence: statistics are measured with normalization by batches; the program normalizes with the stored ones.

    >>> FedAP(lam=0.7)
    fedap(lam=0.7)
    """

    paper = "Lu et al. 2022"
    weighting = "uniform"
    uploads = True

    lam: float = option(0.5, at_least=0.0, at_most=1.0)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if is_batchnorm(slot.module) else Route.SHARED

    @override
    def missing(self, net: Net) -> str | None:
        return None if any(is_batchnorm(m) for m in net.module.modules()) else "BatchNorm layer"

    @override
    def passes(self) -> list[Pass]:
        return [Pass("setup", _measure, self._compare, reduce="grouped")]

    def _compare(self, up: Tree, r: Round) -> Tree:
        """One row of W per client, in the order of names."""
        sent: dict[str, Tree] = {}
        for key, t in up.items():
            name, _, layer = key.rpartition("/")  # a client may have a "/" in its name, a layer has none
            sent.setdefault(name, Tree())[layer] = t
        names = sorted(sent)
        found = [sent[name] for name in names]
        rows = {}
        for i, name in enumerate(names):
            near = torch.stack([_distance(found[i], other) for other in found]).clamp(min=1e-14).reciprocal()
            near[i] = 0.0
            row = near / near.sum() * (1 - self.lam) if len(names) > 1 else near
            row[i] = self.lam
            rows[name] = row
        return join(rows=Tree(rows))

    @override
    def remember(self, r: Received) -> Tree:
        new = {f"models/{k}/{n}": t for k, model in zip(r.clients, r.models, strict=True) for n, t in model.items()}
        return Tree({**r.mine, **new})

    @override
    def model_to(self, model: Tree, mine: Tree, client: str) -> Tree:
        rows = branch(mine, "rows")
        if client not in rows:
            return model
        last = {k: tree for k in sorted(rows) if (tree := branch(mine, f"models/{k}").pick(model))}
        weights = [w for k, w in zip(sorted(rows), rows[client].tolist(), strict=True) if k in last]
        return mean(list(last.values()), weights) if sum(weights) > 0 else model


def _measure(local: Local) -> tuple[Tree, Tree]:
    """Mean and standard deviation per channel of every BatchNorm layer's input, under the client's name."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    like: dict[str, Tensor] = {}
    for inputs in local.layer_inputs(is_batchnorm):
        for name, x in inputs.items():
            m, v, n = raw_moments(x)
            like[name] = m
            m, v = m.double(), v.double()
            both = n * torch.stack([m, v + m * m])
            sums[name] = sums[name] + both if name in sums else both
            counts[name] = counts.get(name, 0) + n
    moments = {name: both / counts[name] for name, both in sums.items()}
    found = {k: torch.stack([m, (square - m * m).clamp(min=0).sqrt()]) for k, (m, square) in moments.items()}
    return local.mine, Tree({f"{local.context.client}/{k}": t.to(like[k]) for k, t in found.items()})


def _distance(a: Tree, b: Tree) -> Tensor:
    return torch.stack([(a[k] - b[k]).norm() for k in a if k in b]).sum()
