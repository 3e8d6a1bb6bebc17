"""FedALA: each client learns, entry by entry, how much of the received model to take over."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Pass, Route, Slot, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Begin, Local, Round

if TYPE_CHECKING:
    from fednorms.core.net import Net

LONGEST = 100  # epochs in which the first weights may converge


@part("fedala")
class FedALA(Part):
    """Start the last layers from w_k + (w_t - w_k) * W; W in [0, 1] is learned on the client's data before each round.

    Paper: FedALA: Adaptive Local Aggregation for Personalized Federated Learning. Zhang et al. AAAI 2023.
    https://arxiv.org/abs/2212.01197 (code: github.com/TsingZ0/PFLlib)

    w_k is the model that the client sent last and w_t the received one. From its last value, at first 1, W becomes
    clip(W - eta dL/dw * (w_t - w_k)) for every batch of a share of the data: once each round, and the first time until
    the losses of ten epochs in a row have a standard deviation below `threshold` (at most 100 epochs). `layers` counts
    weight layers from the output, with 0 for all; the authors use the last one. Lower layers are the received ones, and
    so is everything in a client's first round.
    Acts before training. Clients are tested with the mixture that W makes of the newest model. Client state: W and
    their last layers. No extra communication. With eta=0, W stays 1: the server's model is FedAvg's.

    >>> FedALA(layers=2)
    fedala(layers=2)
    """

    paper = "Zhang et al. 2023 (FedALA)"

    layers: int = option(1, at_least=0)
    eta: float = option(1.0, at_least=0.0)
    share: float = option(0.8, above=0.0, at_most=1.0)
    threshold: float = option(0.1, above=0.0)

    @override
    def route(self, slot: Slot) -> Route:
        high = slot.trainable and (not self.layers or slot.layer > slot.layers - self.layers)
        return Route.SENT if high else Route.SHARED

    @override
    def missing(self, net: Net) -> str | None:
        mixed = any(self._is_mixed(slot) and net.routes[n] is Route.SENT for n, slot in net.slots.items())
        return None if mixed else "layer to mix that is sent"

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        return Tree({**model, **_mixed(model, b.received, branch(b.mine, "W"))})

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", self._learn, _unchanged)]

    def _learn(self, local: Local) -> tuple[Tree, Tree]:
        mine = local.context.names(self._is_mixed)
        received = local.received.pick(mine)
        old = local.kept.pick(received)
        if not old:
            return join(W=received.map(torch.ones_like)), Tree()
        weights, apart, first = branch(local.mine, "W"), received - old, "learned" not in local.mine
        batches = list(local.epoch())
        batches = batches[: math.ceil(self.share * len(batches))]
        losses: list[float] = []
        while batches:
            last = torch.zeros(())
            for number, (x, y) in enumerate(batches):
                point = _mixed(old, received, weights).map(lambda t: t.detach().requires_grad_())
                with torch.enable_grad():
                    last = local.loss(Tree({**local.model, **local.received, **point}), x, y, number)
                    g = torch.autograd.grad(last, list(point.values()), allow_unused=True)
                step = Tree({k: t * apart[k] for k, t in zip(point, g, strict=True) if t is not None})
                weights = (weights - step * self.eta).map(lambda t: t.clamp(0, 1))
            losses.append(float(last.detach()))
            if not first or len(losses) == LONGEST or self._converged(losses):
                break
        learned = torch.ones_like(next(iter(weights.values())).flatten()[0])
        return Tree({**join(W=weights), "learned": learned}), Tree()

    def _is_mixed(self, slot: Slot) -> bool:
        return self.route(slot) is Route.SENT

    def _converged(self, losses: list[float]) -> bool:
        return len(losses) > 10 and float(torch.tensor(losses[-10:]).std(correction=0)) < self.threshold


def _mixed(old: Tree, received: Tree, weights: Tree) -> Tree:
    def one(name: str) -> Tensor:
        return old[name] + (received[name] - old[name]) * weights[name]

    return Tree({name: one(name) for name in weights if name in old and name in received})


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
