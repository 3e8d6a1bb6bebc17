"""FedWon: no normalization layers, scaled weight-standardized convolutions, adaptive gradient clipping."""

from __future__ import annotations

from typing import Literal

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_norm
from fednorms.core.part import Part, option, part, sum_of_parts
from fednorms.core.surgery import Change, swap, swap_convolutions
from fednorms.core.tree import Tree
from fednorms.core.views import Step
from fednorms.layers.agc import adaptive_clip
from fednorms.layers.nf_residual import scale_residuals
from fednorms.layers.no_norm import no_norm_like
from fednorms.layers.scaled_ws import WSConv2d


@part("nonorm")
class NoNorm(Part):
    """Remove every normalization layer (a fused activation stays).

    Paper: FedWon: Triumphing Multi-domain Federated Learning Without Normalization. Zhuang and Lyu. ICLR 2024.
    https://arxiv.org/abs/2306.05879

    First part of FedWon; without the others it is the papers' "without normalization". Acts on the model; no state.

    >>> NoNorm()
    nonorm
    """

    paper = "Zhuang and Lyu 2024 (FedWon)"

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_norm, lambda norm, name: no_norm_like(norm))


@part("wsconv")
class WSConv(Part):
    """Replace every Conv2d by one with scaled standardized filters: gain (W - mean_i) / sqrt(max(N var_i, 1e-4)).

    Paper: FedWon: Triumphing Multi-domain Federated Learning Without Normalization. Zhuang and Lyu. ICLR 2024.
    https://arxiv.org/abs/2306.05879
    Paper: Characterizing Signal Propagation to Close the Performance Gap in Unnormalized ResNets. Brock, De and Smith.
    ICLR 2021. https://arxiv.org/abs/2101.08692
    Paper: Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks. De and Smith.
    NeurIPS 2020. https://arxiv.org/abs/2002.10444

    Acts on the model; one gain per filter more to send, no state. Convolutions keep their own bias flag unless
    add_bias=True. They keep their weights (pretrained ones, for example) unless start="xavier", which starts
    Xavier-normal as the paper's listing does, from seeds hashed from the layers' names.
    The paper replaces the convolutions of residual networks and nothing else. nf_residual=True also scales their blocks
    as NF-ResNets do, h + 0.2 g f(beta h) with a learnable g that starts at 0 (SkipInit). It needs nonorm before it, and
    a larger learning rate, because branches start silent.
    Divergence: the paper's formula has a constant gain and a biased variance, its listing a learnable gain and an
    unbiased one; form="listing" is the default.

    >>> WSConv(form="formula")
    wsconv(form='formula')
    """

    paper = "Zhuang and Lyu 2024 (FedWon)"

    form: Literal["listing", "formula"] = option("listing", choices=("listing", "formula"))
    add_bias: bool = option(False)
    start: Literal["keep", "xavier"] = option("keep", choices=("keep", "xavier"))
    nf_residual: bool = option(False)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        def make(conv: nn.Conv2d, name: str) -> nn.Module:
            return WSConv2d.like(conv, form=self.form, add_bias=self.add_bias, name=name, init=self.start)

        changes = swap_convolutions(model, head, make)
        return [*changes, *scale_residuals(model)] if self.nf_residual else changes


@part("agc")
class AGC(Part):
    """Clip the gradient of each unit (filter, output row) to `clip` times the norm of its weights (at least 1e-3).

    Paper: High-Performance Large-Scale Image Recognition Without Normalization. Brock et al. ICML 2021.
    https://arxiv.org/abs/2102.06171

    G_i <- G_i min(1, clip max(|W_i|, eps) / |G_i|). FedWon uses it with 0.64 for Digits and 1.28 for Office and
    DomainNet. Acts on the gradient; the classifier is not clipped. Off for batches smaller than `min_batch` (FedWon
    clips only at batch size 32). clip=inf changes nothing, bit for bit.

    >>> AGC(clip=1.28)
    agc(clip=1.28)
    """

    paper = "Brock et al. 2021 (AGC)"

    clip: float = option(0.64, above=0.0)
    min_batch: int = option(0, at_least=0)

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        if s.context.batch_size < self.min_batch:
            return g
        return Tree({k: v if k in s.head else adaptive_clip(v, s.params[k], self.clip) for k, v in g.items()})


@sum_of_parts("fedwon")
def fedwon(
    clip: float = 0.64, min_batch: int = 32, start: Literal["keep", "xavier"] = "keep", nf_residual: bool = False
) -> tuple[Part, ...]:
    """FedWon = nonorm + wsconv + agc. Its ablations are the sums without one of them.

    Paper: FedWon: Triumphing Multi-domain Federated Learning Without Normalization. Zhuang and Lyu. ICLR 2024.
    https://arxiv.org/abs/2306.05879

    >>> fedwon(clip=1.28)
    (nonorm, wsconv, agc(clip=1.28, min_batch=32))
    """
    return NoNorm(), WSConv(start=start, nf_residual=nf_residual), AGC(clip=clip, min_batch=min_batch)
