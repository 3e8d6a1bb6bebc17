"""Coordinate-wise median: a minority of clients cannot move a number of the model beyond the values of the others."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, part
from fednorms.core.tree import Tree
from fednorms.core.views import Received


@part("median")
class Median(Part):
    """Replace the mean of the clients' models by their median in every coordinate.

    Paper: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. Yin et al. ICML 2018.
    https://arxiv.org/abs/1803.01498

    w_j <- median_k w_kj for every number j of the parameters and running statistics; of an even number of clients, the
    mean of the two in the middle. A minority of clients, whatever they send, cannot move a coordinate beyond the values
    of the others. Clients count equally, as in the paper. With weighting="size", w_j is the weighted median, at which
    half of the weight is on either side.
    Acts on the server, in place of the mean. No state, nothing more to send, but the server must see each update. What
    other parts send (SCAFFOLD's control variates) is still averaged. The paper takes the median of gradients; here it
    is of models after local training.

    >>> Median()
    median
    """

    paper = "Yin et al. 2018"
    weighting = "uniform"

    @override
    def aggregate(self, r: Received) -> tuple[Tree, Tree]:
        equal = len(set(r.weights)) == 1
        return Tree({k: _median([m[k] for m in r.models], () if equal else r.weights) for k in r.model}), r.mine


def _median(values: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    """The median over clients; no weights: all count equally."""
    found, who = torch.stack(values).sort(dim=0)
    if not weights:
        low, high = found[(len(values) - 1) // 2], found[len(values) // 2]
        return low if len(values) % 2 else (low.double() + high.double()).div(2).to(low)
    below = torch.tensor(weights, dtype=torch.float64, device=who.device)[who].cumsum(dim=0)
    half = below[-1:] / 2
    low = found.gather(0, (below < half).sum(dim=0, keepdim=True))
    high = found.gather(0, (below <= half).sum(dim=0, keepdim=True).clamp(max=len(values) - 1))
    return (low.double() + high.double()).div(2).to(low)[0]
