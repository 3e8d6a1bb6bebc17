"""FedRDN: normalize each image with a random client's statistics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Pass, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Round, Step


@part("fedrdn")
class FedRDN(Part):
    """Train on (x - mu_j) / sigma_j with j drawn for every image each time it is used; test with the site's own pair.

    Paper: A Simple Data Augmentation for Feature Distribution Skewed Federated Learning. Yan et al. CVPR 2025.
    https://arxiv.org/abs/2306.09363

    mu_k and sigma_k are the means over client k's training images of their per-channel mean and standard deviation in
    [0, 1]. They are measured once, pooled and broadcast. Acts on the data; replaces the fixed normalization. Client
    state: its own pair. Sends raw channel statistics of the data once.
    Divergence: the public code draws mean and deviation independently, once per batch, and measures images as training
    augments them (variant="author").

    >>> FedRDN(variant="author")
    fedrdn(variant='author')
    """

    paper = "Yan et al. 2025"
    uploads = True
    never_negative = ("std",)
    normalizes_input = True

    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def passes(self) -> list[Pass]:
        return [Pass("setup", self._measure, self._pool, reduce="stack")]

    def _measure(self, local: Local) -> tuple[Tree, Tree]:
        mean, std, n = torch.zeros(()), torch.zeros(()), 0
        for x in local.images(augmented=self.variant == "author"):
            mean = mean + x.mean((2, 3)).sum(0)
            std = std + x.flatten(2).std(2).sum(0)
            n += len(x)
        pair = Tree(mean=mean / n, std=std / n)
        return pair, pair

    def _pool(self, up: Tree, r: Round) -> Tree:
        return up

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        mean, std = s.mine["mean"].unsqueeze(0), s.mine["std"].unsqueeze(0)
        if not s.testing:
            k = len(s.down["mean"])
            if self.variant == "author":
                draws = (s.uniform(2) * k).long()
                mean, std = s.down["mean"][draws[:1]], s.down["std"][draws[1:]]
            else:
                rows = (s.uniform(len(x)) * k).long()
                mean, std = s.down["mean"][rows], s.down["std"][rows]
        return (x - mean[:, :, None, None]) / std[:, :, None, None].clamp(min=1e-6), y
