"""Coordinate-wise trimmed mean: the largest and smallest values of every coordinate are left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree, mean
from fednorms.core.views import Received


@part("trimmedmean")
class TrimmedMean(Part):
    """Leave out the b largest and the b smallest values of every coordinate, and average the others.

    Paper: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. Yin et al. ICML 2018.
    https://arxiv.org/abs/1803.01498

    w_j <- mean of w_kj over the n - 2b clients that remain for the number j, with b = `fraction` * n, rounded up: a
    small federation is protected, too. At least one or two clients remain (b <= (n - 1) / 2), so fraction=0.5 is the
    median; fraction=0 is the plain mean. b clients, whatever they send, cannot move a coordinate beyond the values of
    the others. Clients count equally, as in the paper; with weighting="size", the remaining values have their weights.
    Acts on the server, in place of the mean of parameters and running statistics. No state, nothing more to send, but
    the server must see each update. What other parts send is still averaged.

    >>> TrimmedMean(fraction=0.1)
    trimmedmean(fraction=0.1)
    """

    paper = "Yin et al. 2018"
    weighting = "uniform"

    fraction: float = option(0.2, at_least=0.0, at_most=0.5)

    @override
    def aggregate(self, r: Received) -> tuple[Tree, Tree]:
        n = len(r.clients)
        b = min(math.ceil(round(self.fraction * n, 9)), (n - 1) // 2)
        if b == 0:
            return mean(list(r.models), list(r.weights)), r.mine
        equal = len(set(r.weights)) == 1
        return Tree({k: _trimmed([m[k] for m in r.models], () if equal else r.weights, b) for k in r.model}), r.mine


def _trimmed(values: list[Tensor], weights: tuple[float, ...], b: int) -> Tensor:
    found, who = torch.stack(values).sort(dim=0, stable=True)
    kept = found[b:-b].double()
    if not weights:
        return kept.mean(dim=0).to(values[0])
    shares = torch.tensor(weights, dtype=torch.float64, device=who.device)[who[b:-b]]
    return ((kept * shares).sum(dim=0) / shares.sum(dim=0)).to(values[0])
