"""A cap on the weight of one client, who may report more images than it has."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Received


@part("maxweight")
class MaxWeight(Part):
    """Let no client have more than a share of the weight: p_k <- min(p_k, c), with c such that max p_k <= share.

    Paper: Towards Federated Learning With Byzantine-Robust Client Weighting. Portnoy et al. arXiv 2020.
    https://arxiv.org/abs/2004.04986

    A client reports its number of images itself, and the server can only believe it. Truncated weights are divided by
    their sum again. If share * n < 1, all clients have the same weight. No bit changes while no weight is above the
    share. The paper chooses the cap such that the largest clients together stay below a given share; here it is the
    share of each one.
    Acts on the clients' weights, after the parts before it: list it after other parts that weigh. No state, nothing
    more to send, but the server must see each update.

    >>> MaxWeight(share=0.3)
    maxweight(share=0.3)
    """

    paper = "Portnoy et al. 2020"

    share: float = option(0.5, above=0.0, at_most=1.0)

    @override
    def weigh(self, r: Received) -> tuple[list[float], Tree]:
        cap = _cap([w for w in r.weights if w > 0], self.share)
        return [min(1.0, cap / w) if w > 0 else 1.0 for w in r.weights], r.mine


def _cap(weights: list[float], share: float) -> float:
    """The value at which weights are cut off: the largest then has at most this share of their sum.

    >>> _cap([1.0, 1.0, 8.0], 0.5), _cap([1.0, 2.0, 8.0], 0.1), _cap([1.0, 1.0], 0.5)
    (2.0, 1.0, 1.0)
    """
    ordered = sorted(weights)
    if ordered[-1] <= share * sum(ordered):
        return ordered[-1]
    for cut in range(1, len(ordered)):  # the largest `cut` weights become c: c = share * (rest + cut * c)
        rest = sum(ordered[:-cut])
        if share * cut < 1 and (cap := share * rest / (1 - share * cut)) >= ordered[-cut - 1]:
            return cap
    return ordered[0]
