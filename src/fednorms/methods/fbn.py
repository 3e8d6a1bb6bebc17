"""FBN: normalize with global statistics also in training, and pool them without bias."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.surgery import Change, swap
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Begin, End, Round
from fednorms.layers.global_norm import GlobalNorm


@part("fbn")
class FBN(Part):
    """Normalize with the global mean and variance as constants; pool what clients measured in their local steps.

    Paper: Overcoming the Challenges of Batch Normalization in Federated Learning. Guerraoui et al. arXiv 2024.
    https://arxiv.org/abs/2405.14670

    m = sum n_k m_k / n, v = sum n_k (v_k + (m_k - m)^2) / (n - 1), n in images, m_k and v_k the moments of all inputs
    that client k's layer saw in the round; (mu, var) <- (1 - rho) (mu, var) + rho (m, v). Acts on the model; the part
    owns the statistics and resets what is measured at the start of each round. No client state; 2C floats per layer
    each way.
    Divergence: third-party code pools around the smoothed mean and leaves out the variance between batches; this part
    pools exactly.

    >>> FBN(rho=0.5)
    fbn(rho=0.5)
    """

    paper = "Guerraoui et al. 2024"
    uploads = True
    never_negative = ("n/*", "second/*")
    counts_images = ("n/*",)
    reduction = "sum"

    rho: float = option(0.1, at_least=0.0, at_most=1.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: GlobalNorm.like(bn, name))

    @override
    def route(self, slot: Slot) -> Route:
        return Route.OWNED if isinstance(slot.module, GlobalNorm) and slot.kind == "buffer" else Route.SHARED

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        measured = [k for k in b.owned if k.rsplit(".", 1)[-1] in ("seen", "seen_mean", "seen_var")]
        return Tree({**model, **b.down, **model.pick(measured).zeros()})

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        seen = {k.rsplit(".", 1)[0]: e.model[k] for k in e.owned if k.rsplit(".", 1)[-1] == "seen"}
        n, first, second = Tree(), Tree(), Tree()  # sums in float64, because the server subtracts them
        for layer, count in seen.items():
            m, v = (e.model[f"{layer}.{leaf}"].double() for leaf in ("seen_mean", "seen_var"))
            n[layer] = e.context.samples * (count > 0).double()  # a layer may not have been used
            first[layer], second[layer] = n[layer] * m, n[layer] * (v + m.square())
        return e.mine, join(n=n, first=first, second=second)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        new = Tree(r.mine)
        first, second = branch(r.up, "first"), branch(r.up, "second")
        for layer, n in branch(r.up, "n").items():
            m = first[layer] / n.clamp(min=1)
            v = (second[layer] - n * m.square()).clamp(min=0) / (n - 1).clamp(min=1)
            for leaf, value in (("mean", m), ("var", v)):
                start = new.get(f"{layer}.{leaf}", r.model[f"{layer}.{leaf}"])
                moved = torch.lerp(start.double(), value, self.rho)
                new[f"{layer}.{leaf}"] = torch.where(n > 0, moved, start.double()).to(start.dtype)
        return delta, new
