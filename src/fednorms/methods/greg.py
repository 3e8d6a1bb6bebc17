"""GReg: keep batch normalization, make batch and global statistics predict alike; and the paper's four alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm, keeps_statistics
from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.surgery import Change, swap
from fednorms.core.tree import Tree
from fednorms.core.views import Begin, Context, Round, Step
from fednorms.layers.mixed_norm import MixedNorm

if TYPE_CHECKING:
    from fednorms.core.net import Net


def symmetric_kl(a: Tensor, b: Tensor) -> Tensor:
    """Half of KL(p||q) + KL(q||p) = 1/2 sum (p - q)(log p - log q) of two batches of logits, mean over the batch.

    >>> symmetric_kl(torch.zeros(1, 2), torch.zeros(1, 2)).item()
    0.0
    """
    log_p, log_q = a.log_softmax(1), b.log_softmax(1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(1).mean()


@part("greg")
class GReg(Part):
    """Add alpha times the symmetric KL divergence between predictions with batch and with received statistics.

    Paper: Improving Batch Normalization in Federated Learning with Non-IID Features. Anonymous authors. Submission
    17440 to ICLR 2026. https://openreview.net/forum?id=225qfh0CoD

    l = CE(q_b, y) + alpha/2 (KL(q_b||q_g) + KL(q_g||q_b)), from the second round on. The server smooths the statistics
    from the first round on: S <- (1 - rho) S + rho mean(S_k). Acts on the local loss (a second forward pass that
    changes no buffer) and on the server's statistics. No client state, no extra communication. alpha=0 with rho=1 is
    FedAvg bit for bit. Gradients flow through both passes unless detach_global=True (the paper does not say).

    >>> GReg(alpha=1.5)
    greg(alpha=1.5)
    """

    paper = "Anonymous 2026 (GReg)"

    alpha: float = option(1.0, at_least=0.0)
    rho: float = option(0.1, at_least=0.0, at_most=1.0)
    detach_global: bool = option(False)

    @override
    def missing(self, net: Net) -> str | None:
        shared = {n.rpartition(".")[0] for n in net.statistics if net.routes[n] is Route.SHARED}
        found = any(keeps_statistics(net.module.get_submodule(n)) for n in shared)
        return None if found else "normalization layer whose running statistics are shared"

    @override
    def path(self, c: Context) -> bool:
        return bool(self.alpha) and c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.path[self.name]:
            return 0.0
        with torch.set_grad_enabled(not self.detach_global):
            logits, _ = s.forward(s.params, s.x, stats="broadcast")
        return self.alpha * symmetric_kl(s.logits, logits)

    @override
    def stats(self, delta: Tree, r: Round) -> Tree:
        return delta if self.rho == 1 else delta * self.rho


@part("mixbn")
class MixBN(Part):
    """Train with a mixture of batch and received statistics: the four alternatives that GReg is compared with.

    Paper: Improving Batch Normalization in Federated Learning with Non-IID Features. Anonymous authors. Submission
    17440 to ICLR 2026. https://openreview.net/forum?id=225qfh0CoD

    Appendix E.3 of the paper. kind="global": only the received statistics; "fixed": (1 - lam) batch + lam received;
    "learned": the same with a trained lam per layer; "ensemble": the mean of both normalized activations. Active from
    the second round on; tests use the averaged running statistics. Acts on the model; no state, no extra communication
    (learned: one number per layer).

    >>> MixBN(kind="ensemble")
    mixbn(kind='ensemble')
    """

    paper = "Anonymous 2026 (GReg, appendix E.3)"

    kind: Literal["global", "fixed", "learned", "ensemble"] = option(
        "fixed", choices=("global", "fixed", "learned", "ensemble")
    )
    lam: float = option(0.5, at_least=0.0, at_most=1.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: MixedNorm.like(bn, kind=self.kind, lam=self.lam, name=name))

    @override
    def route(self, slot: Slot) -> Route:
        mine = isinstance(slot.module, MixedNorm) and slot.leaf in ("sent_mean", "sent_var", "active")
        return Route.OWNED if mine else Route.SHARED

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        out = Tree(model)
        for name in b.owned:
            layer, leaf = name.rsplit(".", 1)
            if leaf == "active":
                out[name] = torch.full_like(model[name], float(b.context.round > 0))
            else:
                out[name] = model[f"{layer}.{leaf.replace('sent', 'running')}"]
        return out
