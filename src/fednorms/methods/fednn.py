"""FedNN: weight normalization and adaptive group normalization."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Route, Slot, option, part, sum_of_parts
from fednorms.core.surgery import Change, swap, swap_convolutions
from fednorms.core.tree import Tree
from fednorms.core.views import Begin, Round
from fednorms.layers.adaptive_group_norm import AdaptiveGroupNorm, all_froze
from fednorms.layers.weight_norm import WNConv2d


@part("wn")
class WeightNorm(Part):
    """Convolve with standardized filters: (W - mean_i) / sqrt(var_i + eps), no gain.

    Paper: FedNN: Federated learning on concept drift data using weight and adaptive group normalizations. Kang et al.
    Pattern Recognition 149, 2024. https://doi.org/10.1016/j.patcog.2023.110230

    Without other parts it is the ablation WN+BN; with nonorm, WN only; with gn(groups=2), WN+GN. Acts on the model;
    what is stored and averaged is W. No state.
    Divergence: the text has a biased variance with eps in the root (default); the public code divides by the sample
    deviation + 1e-5 (variant="author").

    >>> WeightNorm(variant="author")
    wn(variant='author')
    """

    paper = "Kang et al. 2024 (FedNN)"

    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        def make(conv: nn.Conv2d, name: str) -> nn.Module:
            return WNConv2d.like(conv, variant=self.variant, name=name)

        return swap_convolutions(model, head, make)


@part("agn")
class AGN(Part):
    """Let every normalization layer choose between batch and group statistics by a Gumbel softmax.

    Paper: FedNN: Federated learning on concept drift data using weight and adaptive group normalizations. Kang et al.
    Pattern Recognition 149, 2024. https://doi.org/10.1016/j.patcog.2023.110230

    s = softmax((a + G) / tau), tau_t = tau (T - t + 0.001) / T in round t, counted from 0. Acts on the model; this part
    owns the temperature and sets it from the round; it is never averaged. No client state.
    Running statistics of the batch branch: r <- keep r + (1 - keep) batch value; those that a pretrained BatchNorm has
    gathered are kept.
    Divergence: the text mixes deviations, the public code variances with other divisors (variant="author"). The code
    also samples in tests (eval_mode="sample"); the default is the noise-free softmax. In the code a layer freezes
    (freeze_on_saturation=True): once a share drawn in training is one-hot in float32, it is used from then on, without
    sampling and without a gradient for a. The global model is frozen where all participants are, and then uses the mean
    of their shares. The code writes the share over a; here both are stored, so where only some participants are frozen,
    the server averages their last a.

    >>> AGN(tau=3.0)
    agn(tau=3.0)
    """

    paper = "Kang et al. 2024 (FedNN)"
    uses_rounds = True

    tau: float = option(5.0, above=0.0)
    groups: int = option(2, at_least=1)
    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))
    eval_mode: Literal["soft", "hard", "sample"] = option("soft", choices=("soft", "hard", "sample"))
    keep: float = option(0.997, at_least=0.0, at_most=1.0)
    eps: float = option(1e-5, above=0.0)
    freeze_on_saturation: bool = option(False)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        def make(bn: nn.Module, name: str) -> nn.Module:
            return AdaptiveGroupNorm.like(
                bn,
                groups=self.groups,
                variant=self.variant,
                eval_mode=self.eval_mode,
                eps=self.eps,
                keep=self.keep,
                tau=self.tau,
                name=name,
                freeze_on_saturation=self.freeze_on_saturation,
            )

        return swap(model, is_batchnorm, make)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.OWNED if isinstance(slot.module, AdaptiveGroupNorm) and slot.leaf == "tau" else Route.SHARED

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        # A test after a round keeps the temperature that round trained with.
        t = max(b.context.round - 1, 0) if b.context.evaluating else b.context.round
        tau = self.tau * (b.context.rounds - t + 1e-3) / b.context.rounds
        return Tree({**model, **{k: torch.full_like(model[k], tau) for k in b.owned}})

    @override
    def stats(self, delta: Tree, r: Round) -> Tree:
        # A mean of choices is a choice only if every participant has made one.
        choices = r.context.names(lambda slot: isinstance(slot.module, AdaptiveGroupNorm) and slot.leaf == "choice")
        mean = {k: r.model[k] + delta[k] for k in choices if k in delta}
        undone = Tree({k: -r.model[k] for k, c in mean.items() if c.any() and not all_froze(c)})
        return Tree({**delta, **undone}) if undone else delta


@sum_of_parts("fednn")
def fednn(
    tau: float = 5.0,
    groups: int = 2,
    variant: Literal["paper", "author"] = "paper",
    keep: float = 0.997,
    freeze_on_saturation: bool = False,
) -> tuple[Part, ...]:
    """FedNN = wn + agn.

    Paper: FedNN: Federated learning on concept drift data using weight and adaptive group normalizations. Kang et al.
    Pattern Recognition 149, 2024. https://doi.org/10.1016/j.patcog.2023.110230

    variant="author" takes the formulas of the public code (github.com/myeongkyunkang/FedNN). That code also freezes
    always, which happens in the last rounds, when tau is small: freeze_on_saturation=True. It is off by default in
    both variants, so stored results of variant="author", which never froze, keep their meaning.

    >>> fednn(tau=3.0)
    (wn, agn(tau=3.0))
    """
    agn = AGN(tau=tau, groups=groups, variant=variant, keep=keep, freeze_on_saturation=freeze_on_saturation)
    return WeightNorm(variant=variant), agn
