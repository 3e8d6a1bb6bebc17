"""HBN: a learned mixture of batch and global statistics; global statistics are measured separately from training."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.moments import raw_moments
from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Pass, Route, Slot, option, part
from fednorms.core.surgery import Change, swap
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Begin, Local, Round
from fednorms.layers.hybrid_norm import HybridNorm


@part("hbn")
class HBN(Part):
    """Normalize with (1 - a) global + a batch statistics, a = sigmoid(phi) per channel; tests use the global ones.

    Paper: Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning. Chen et al.
    ICML 2025. https://arxiv.org/abs/2505.21877

    Before training in a round, each client measures raw moments of its data with the received model; the server pools
    them, m = sum n_k m_k / n, v = sum n_k (v_k + (m_k - m)^2) / (n - 1), n in images, and moves the global statistics
    by `rate`. A test measures them again (one exchange). Acts on the model and by passes. Clients keep their own phi,
    which is also averaged for those who have none.
    Divergence: the public code measures one batch of 64 and records mixed statistics (variant="author"); the default
    measures all local data, raw.

    >>> HBN(rate=0.01)
    hbn(rate=0.01)
    """

    paper = "Chen et al. 2025 (HBN)"
    uploads = True
    never_negative = ("moments/var/*", "count/*")
    counts_images = ("count/*",)

    rate: float = option(0.002, at_least=0.0, at_most=1.0)
    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: HybridNorm.like(bn, name=name))

    @override
    def route(self, slot: Slot) -> Route:
        if not isinstance(slot.module, HybridNorm):
            return Route.SHARED
        if slot.kind == "buffer":
            return Route.OWNED
        return Route.SENT if slot.leaf == "phi" else Route.SHARED

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        return Tree({**model, **b.down})

    @override
    def passes(self) -> list[Pass]:
        def smoothed(up: Tree, r: Round) -> Tree:
            return self._pooled(up, r, self.rate)

        def fresh(up: Tree, r: Round) -> Tree:
            return self._pooled(up, r, 1.0)

        return [
            Pass("before", self._measure, smoothed, reduce="stack"),
            Pass("evaluate", self._measure, fresh, reduce="stack"),
        ]

    def _measure(self, local: Local) -> tuple[Tree, Tree]:
        """Mean and biased variance of every layer's input over all local data, merged exactly over batches."""
        author = self.variant == "author"
        sums: dict[str, list[Tensor]] = {}
        counts: dict[str, int] = {}
        size = 64 if author else None
        for inputs in local.layer_inputs(lambda m: isinstance(m, HybridNorm), size, shuffled=not author):
            for name, x in inputs.items():
                mean, var, n = raw_moments(x)
                if author:
                    mean, var = self._mixed(local.model, name, mean, var)
                mean, var = mean.double(), var.double()
                first, second = n * mean, n * (var + mean * mean)
                old = sums.get(name)
                sums[name] = [old[0] + first, old[1] + second] if old else [first, second]
                counts[name] = counts.get(name, 0) + n
            if author:
                break
        means = Tree({k: a / counts[k] for k, (a, _) in sums.items()})
        variances = Tree({k: (b / counts[k] - means[k] ** 2).clamp(min=0) for k, (_, b) in sums.items()})
        n_k = torch.full_like(next(iter(means.values())).sum(), float(local.context.samples))
        return local.mine, join(moments=join(mean=means, var=variances), count=Tree(images=n_k))

    def _mixed(self, model: Tree, name: str, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        a = model[f"{name}.phi"].sigmoid()
        return (1 - a) * model[f"{name}.mean"] + a * mean, (1 - a) * model[f"{name}.var"] + a * var

    def _pooled(self, up: Tree, r: Round, rate: float) -> Tree:
        n = up["count/images"]
        moments = branch(up, "moments")
        new = Tree(r.mine)
        for layer, means in branch(moments, "mean").items():
            weights = n.to(means).unsqueeze(1)
            m = (weights * means).sum(0) / weights.sum()
            v = (weights * (moments[f"var/{layer}"] + (means - m) ** 2)).sum(0) / (weights.sum() - 1).clamp(min=1)
            for leaf, value in (("mean", m), ("var", v)):
                name = f"{layer}.{leaf}"
                start = r.mine.get(name, r.model[name])
                new[name] = (rate * value + (1 - rate) * start).to(start.dtype)
        return new
