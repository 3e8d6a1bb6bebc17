"""FedLAW: the server learns how much each client's model counts, and how far their sum is shrunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.norms import keeps_statistics
from fednorms.core.part import PROXY, Part, Route, Slot, option, part
from fednorms.core.tree import Tree, mean
from fednorms.core.views import Received

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("fedlaw")
class FedLAW(Part):
    """Set w to gamma sum_k lambda_k w_k; gamma > 0 and lambda >= 0 of sum 1 minimize the loss on the server's images.

    Paper: Revisiting Weighted Aggregation in Federated Learning with Neural Networks. Li et al. ICML 2023.
    https://arxiv.org/abs/2302.10911 (code: github.com/ZexiLee/ICML-2023-FedLAW)

    The server needs labeled images of its own, a proxy set: the recipe's data.proxy names them. In every round it
    takes `epochs` passes over them, in train mode, with steps for theta: gamma = e^g and lambda = softmax(theta) from
    g = 0 and theta = log p, with form="quad" gamma = g^2 and lambda = theta^2 / |theta|^2 from 1 and equal entries.
    The rate is halved every 20 epochs; Adam has the betas 0.5 and 0.999, SGD a momentum of 0.9. The authors use
    0.01 for CIFAR-10 and 0.005 for other data. Parameters are combined in this way; running statistics are the
    server's own, updated in these passes. Acts on the mean of models, without state or communication. epochs=0 is
    FedAvg bit for bit.
    Divergence: the program's second variant (first lambda, with averaged steps, then gamma) is not implemented.

    >>> FedLAW(epochs=5, form="quad")
    fedlaw(epochs=5, form='quad')
    """

    paper = "Li et al. 2023 (FedLAW)"
    requires = frozenset({PROXY})

    epochs: int = option(20, at_least=0)
    lr: float = option(0.01, above=0.0)
    form: str = option("exp", choices=("exp", "quad"))
    optimizer: str = option("adam", choices=("adam", "sgd"))
    batch_size: int = option(128, at_least=1)

    @override
    def missing(self, net: Net) -> str | None:
        kept = [name for name, route in net.routes.items() if route in (Route.LOCAL, Route.OWNED)]
        return f"complete copy at the server, where it must run: clients keep {kept[0]}" if kept else None

    @override
    def aggregate(self, r: Received) -> tuple[Tree, Tree]:
        if not self.epochs:
            return mean(list(r.models), list(r.weights)), r.mine
        images, context = r.proxy, r.context
        models = {n: torch.stack([m[n] for m in r.models]) for n in context.names(_is_param) if n in r.model}
        buffers = images.model.pick(context.names(_is_buffer)).clone()
        first = torch.tensor(r.weights, dtype=torch.float64) / sum(r.weights)
        theta = self._first(first).to(next(iter(models.values()))).requires_grad_()
        adam = self.optimizer == "adam"
        how = torch.optim.Adam([theta], betas=(0.5, 0.999)) if adam else torch.optim.SGD([theta], momentum=0.9)
        draw = 0
        for epoch in range(self.epochs):
            how.param_groups[0]["lr"] = self.lr * 0.5 ** (epoch // 20)
            for x, y in images.batches(self.batch_size, epoch):
                with torch.enable_grad():
                    gamma, lam = self._weights(theta)
                    point = {n: torch.tensordot(gamma * lam, t, 1) for n, t in models.items()}
                    logits = images.logits(Tree({**images.model, **buffers, **point}), x, draw)
                    theta.grad = torch.autograd.grad(images.base(logits, y), theta)[0]
                how.step()
                draw += 1
        if not draw:
            raise BadInput(
                "fedlaw: the server's images make no batch of two, and this model's BatchNorm normalizes one value per "
                "channel and image. Give the server more images, or set a larger fedlaw(batch_size=...)."
            )
        gamma, lam = self._weights(theta.detach())
        found = mean(list(r.models), lam.tolist())
        statistics = buffers.pick(context.names(_is_statistic)).pick(found)
        return Tree({**found, **(found.pick(models) * float(gamma)), **statistics}), r.mine

    def _first(self, share: Tensor) -> Tensor:
        """The start of theta, with g as its last entry."""
        if self.form == "exp":
            return torch.cat([share.log(), share.new_zeros(1)])
        return torch.cat([torch.full_like(share, len(share) ** -0.5), share.new_ones(1)])

    def _weights(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers gamma and lambda."""
        each, g = theta[:-1], theta[-1]
        return (g.exp(), each.softmax(0)) if self.form == "exp" else (g * g, each.square() / each.square().sum())


def _is_param(slot: Slot) -> bool:
    return slot.kind == "param"


def _is_buffer(slot: Slot) -> bool:
    return slot.kind == "buffer"


def _is_statistic(slot: Slot) -> bool:
    return slot.kind == "buffer" and keeps_statistics(slot.module)
