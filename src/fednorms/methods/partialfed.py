"""PartialFed: everything is averaged, but a client loads only some layers of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Pass, Route, Slot, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Begin, Local, Round

if TYPE_CHECKING:
    from fednorms.core.net import Net

Strategy = Literal["no_bn_no_head", "no_bn", "bottom_up", "top_down", "adaptive"]


@part("partialfed")
class PartialFed(Part):
    """Start layer l from a_l w_l + (1 - a_l) v_l: the server's w where a = 1, otherwise the client's own last v.

    Paper: PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization. Sun et al. NeurIPS 2021.
    https://openreview.net/forum?id=lgDP84byd5

    Fixed strategies load all but BatchNorm and classifier (`no_bn_no_head`), all but BatchNorm (`no_bn`), the first `m`
    weight layers (`bottom_up`) or the last `m` (`top_down`). `adaptive` learns a: each round, for `choice_epochs`
    epochs with both copies frozen, a straight-through Gumbel-softmax sample of two logits per layer at temperature T_0
    cooling^round mixes the copies, and SGD with `choice_rate` on the method's base loss (`objective`) of training
    images (`batch`) moves the logits; then a = argmax (a tie loads). Acts on routes (SENT), and by a pass before
    training. Client state: the tensors it does not load (adaptive: its whole last model and two numbers per layer).
    Communication: as FedAvg; strategies never leave the client.
    Divergence: the adaptive schedule and its numbers are our reconstruction, not the authors'.

    >>> PartialFed(strategy="top_down", m=2)
    partialfed(strategy='top_down', m=2)
    """

    paper = "Sun et al. 2021"

    strategy: Strategy = option(
        "no_bn_no_head", choices=("no_bn_no_head", "no_bn", "bottom_up", "top_down", "adaptive")
    )
    m: int = option(1, at_least=0)
    temperature: float = option(5.0, above=0.0)
    cooling: float = option(0.965, above=0.0, at_most=1.0)
    choice_rate: float = option(0.1, at_least=0.0)
    choice_epochs: int = option(1, at_least=1)

    @override
    def route(self, slot: Slot) -> Route:
        loaded = {
            "no_bn_no_head": not slot.head and not is_batchnorm(slot.module),
            "no_bn": not is_batchnorm(slot.module),
            "bottom_up": slot.layer <= self.m,
            "top_down": slot.layer > slot.layers - self.m,
            "adaptive": False,
        }
        return Route.SHARED if loaded[self.strategy] else Route.SENT

    @override
    def missing(self, net: Net) -> str | None:
        found = Route.SENT in net.routes.values()
        return None if found else "tensor that it decides about and that no other part keeps back"

    # -- adaptive ---------------------------------------------------------------------------------------------
    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        if self.strategy != "adaptive":
            return Tree(), Tree()
        return Tree(), Tree({_unit(name): tensor.new_zeros(2) for name, tensor in w.items()})  # (keep, load)

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        loaded = {unit for unit, q in b.mine.items() if q[1] >= q[0]}
        return Tree({**model, **{name: t for name, t in b.received.items() if _unit(name) in loaded}})

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", self._choose, _unchanged)] if self.strategy == "adaptive" else []

    def _choose(self, local: Local) -> tuple[Tree, Tree]:
        """Move the logits with both copies of the model frozen; a client's first round has only one copy."""
        mine = local.mine
        if not local.kept:
            return mine, Tree()
        units = list(mine)
        q = torch.stack([mine[u] for u in units])
        heat = self.temperature * self.cooling**local.context.round
        draw = 0
        for epoch in range(self.choice_epochs):
            for x, y in local.epoch(epoch):
                q = q.detach().requires_grad_()
                gumbel = -(-local.uniform(draw, len(units), 2).log()).log()
                soft = ((q + gumbel) / heat).softmax(1)
                hard = torch.nn.functional.one_hot(soft.argmax(1), 2).to(soft)
                model = self._mixed(local, units, hard + soft - soft.detach())
                (g,) = torch.autograd.grad(local.loss(model, x, y, draw), q)
                q = q.detach() - self.choice_rate * g
                draw += 1
        return Tree(zip(units, q.detach().unbind(), strict=True)), Tree()

    def _mixed(self, local: Local, units: list[str], a: Tensor) -> Tree:
        number = {unit: i for i, unit in enumerate(units)}
        model = Tree(local.model)
        for name, loaded in local.received.items():
            i = number.get(_unit(name))
            if i is not None and name in local.kept and loaded.is_floating_point():
                model[name] = a[i, 1] * loaded + a[i, 0] * local.kept[name]
        return model


def _unit(name: str) -> str:
    """The module that a tensor belongs to."""
    return name.rpartition(".")[0]


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
