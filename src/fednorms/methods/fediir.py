"""FedIIR: the classifier's gradients of all clients should agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Pass, Slot, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Local, Round, Step, Weights

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("fediir")
class FedIIR(Part):
    """Add penalty |g - gbar|^2 to the loss, g the classifier's gradient on a batch and gbar its mean over all clients.

    Paper: Out-of-Distribution Generalization of Federated Learning via Implicit Invariant Relationships. Guo et al.
    ICML 2023. https://proceedings.mlr.press/v202/guo23b.html (code: github.com/YamingGuo98/FedIIR)

    The penalty is differentiated through g. gbar <- ema gbar + (1 - ema) new, where new is the mean gradient over all
    batches of a round's clients at the model that they received; it starts at 0. The authors have ema=0.95 and a
    penalty from 0.0005 (Office-Home) to 0.01 (rotated MNIST). Acts on the loss, and by a pass over the data before
    training. Server state: gbar. Communication: the classifier's size up and down. penalty=0 is FedAvg bit for bit.
    Divergence: the program measures a round's gradients in an exchange of its own before training. Here they are sent
    with the round's models, so gbar is that of the rounds before.

    >>> FedIIR(penalty=0.01)
    fediir(penalty=0.01)
    """

    paper = "Guo et al. 2023"
    uploads = True

    penalty: float = option(0.001, at_least=0.0)
    ema: float = option(0.95, at_least=0.0, at_most=1.0)

    @override
    def missing(self, net: Net) -> str | None:
        return None if net.head_names & set(net.sent_params) else "classifier that is trained and sent"

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        assert isinstance(w, Weights)
        return w.pick(w.names(_of_head)).zeros(), Tree()

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.penalty or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        head = s.params.pick(n for n in s.down if s.params[n].requires_grad)  # in some phases it does not train
        if not head:
            return 0.0
        g = torch.autograd.grad(s.value, list(head.values()), create_graph=True, allow_unused=True)
        return self.penalty * (_found(head, g) - s.down).sqnorm()

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", self._measure, self._follow, reduce="sum")]

    def _measure(self, local: Local) -> tuple[Tree, Tree]:
        """The sum of the batches' gradients at the received model, and how many there are."""
        point = local.received.pick(local.down).map(lambda t: t.detach().requires_grad_())
        total, batches = point.zeros(), 0
        for number, (x, y) in enumerate(local.epoch() if self.penalty else ()):
            with torch.enable_grad():
                value = local.loss(Tree({**local.model, **point}), x, y, number)
                g = torch.autograd.grad(value, list(point.values()), allow_unused=True)
            total, batches = total + _found(point, g), batches + 1
        like = next(iter(point.values()))
        return Tree(), Tree({**join(sum=total.detach()), "batches": like.new_tensor(float(batches))})

    def _follow(self, up: Tree, r: Round) -> Tree:
        if not up or not up["batches"] > 0:
            return r.mine
        return r.mine * self.ema + branch(up, "sum") * ((1 - self.ema) / up["batches"])


def _of_head(slot: Slot) -> bool:
    return slot.head


def _found(tensors: Tree, g: tuple[Tensor | None, ...]) -> Tree:
    """The gradients of the tensors that the loss depends on."""
    return Tree({name: t for name, t in zip(tensors, g, strict=True) if t is not None})
