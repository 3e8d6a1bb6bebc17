"""Krum and Multi-Krum: only the clients whose updates lie closest to those of the others are averaged."""

from __future__ import annotations

import torch
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Received


@part("krum")
class Krum(Part):
    """Average only the `keep` clients whose updates are closest to their nearest n - f - 2 neighbors.

    Paper: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent. Blanchard et al. NeurIPS 2017.
    https://papers.nips.cc/paper_files/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html

    The score of client k is the sum of |d_k - d_i|^2 over the n - f - 2 other clients i that are closest to it, where
    d_k is its update (parameters and running statistics as one vector), n the number of clients in the round and f =
    `byzantine` how many of them may be hostile. The clients with the lowest scores are averaged: one of them is Krum,
    keep > 1 is Multi-Krum, keep >= n is FedAvg with equal weights. Among equal scores, names decide. The paper's
    guarantee needs n > 2 f + 2; with fewer clients, the nearest neighbor is counted.
    Acts on the clients' weights: the others have weight 0, so what they send for other parts is not used either. No
    state, nothing more to send, but the server must see each update. The paper compares gradients; here these are
    updates after local training.

    >>> Krum(byzantine=2, keep=3)
    krum(byzantine=2, keep=3)
    """

    paper = "Blanchard et al. 2017"
    weighting = "uniform"

    byzantine: int = option(1, at_least=0)
    keep: int = option(1, at_least=1)

    @override
    def weigh(self, r: Received) -> tuple[list[float], Tree]:
        n = len(r.clients)
        if self.keep >= n or not r.model:
            return [1.0] * n, r.mine
        rows = torch.stack([torch.cat([t.flatten().double() for t in u.values()]) for u in r.updates])
        # By differences: |a|^2 + |b|^2 - 2 ab loses the digits of close updates.
        between = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = min(max(n - self.byzantine - 2, 1), n - 1)
        scores = between.sort(dim=1).values[:, 1 : near + 1].sum(dim=1)  # the first is the client itself
        best = set(scores.sort(stable=True).indices[: self.keep].tolist())
        return [float(k in best) for k in range(n)], r.mine
