"""FedDBE: keep what is special about a client's features in its own vector, and pull their mean to all clients'."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.surgery import Change, swap_heads
from fednorms.core.tree import Tree
from fednorms.core.views import Begin, Context, End, Round, Step
from fednorms.layers.shifted_linear import ShiftedLinear


@part("feddbe")
class FedDBE(Part):
    """Classify f + v_k, v_k learned and local, and add kappa/2 mean((m - M)^2): m follows f, M is all clients' mean.

    Paper: Eliminating Domain Bias for Federated Learning in Representation Space. Zhang et al. NeurIPS 2023.
    https://arxiv.org/abs/2311.14975 (code: github.com/TsingZ0/PFLlib)

    f are the features that the classifier gets. m starts at 0 in every round and becomes (1 - momentum) m + momentum
    mean(f) with each batch. The first round is FedAvg's and measures M, the mean of its clients' m, which then stays.
    The program has momentum=0.1, and kappa is chosen per data set. Acts on layers, routes and the loss. Client state:
    v_k and m. Server state: M. Communication: d numbers up once, and down in every round, for d features.
    Divergence: the program measures M in local training before the first round, whose models are thrown away.

    >>> FedDBE(kappa=50.0, momentum=1.0)
    feddbe(kappa=50.0, momentum=1.0)
    """

    paper = "Zhang et al. 2023 (FedDBE)"
    uploads = True

    kappa: float = option(1.0, at_least=0.0)
    momentum: float = option(0.1, above=0.0, at_most=1.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap_heads(self.name, model, head, lambda linear, name: ShiftedLinear(linear, self.momentum, name))

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if _is_own(slot) else Route.SHARED

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        return Tree({**model, **model.pick(b.context.names(_is_mean)).zeros()})

    @override
    def path(self, c: Context) -> Hashable:
        return c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.kappa or not s.down or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        batch = s.features.flatten(1).mean(0)
        m = s.buffers[s.context.names(_is_mean)[0]].detach() + self.momentum * (batch - batch.detach())
        return self.kappa / 2 * (m - s.down["mean"]).square().mean()

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        """Keep v_k at 0 until M is known."""
        if s.down or s.context.evaluating:
            return g
        own = set(s.context.names(_is_own))
        return Tree({name: t for name, t in g.items() if name not in own})

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        if e.down:
            return e.mine, Tree()
        return e.mine, Tree(mean=e.model[e.context.names(_is_mean)[0]])

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta, r.mine or Tree(r.up)


def _is_own(slot: Slot) -> bool:
    return isinstance(slot.module, ShiftedLinear) and slot.leaf in ("shift", "features_mean")


def _is_mean(slot: Slot) -> bool:
    return isinstance(slot.module, ShiftedLinear) and slot.leaf == "features_mean"
