"""FedBABU: train the body with a random head that never moves."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Eval, Part, Phase, Route, Slot, option, part


@part("fedbabu")
class FedBABU(Part):
    """Freeze the classifier at its initial value during federated training; fine-tune everything for personal use.

    Paper: FedBABU: Towards Enhanced Representation for Federated Image Classification. Oh, Kim and Yun. ICLR 2022.
    https://arxiv.org/abs/2106.06042

    The paper fine-tunes for five epochs at 0.001. Acts on routes; the head is a shared constant that is never sent. No
    state. "+ fedbabu" applies to any method, whose control variates and norms then cover only the body.

    >>> FedBABU(epochs=1)
    fedbabu(epochs=1)
    """

    paper = "Oh et al. 2022"

    epochs: int = option(5, at_least=0)
    lr: float = option(0.001, at_least=0.0)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.FROZEN if slot.head else Route.SHARED

    @override
    def evaluation(self) -> Eval:
        return Eval(phases=(Phase(epochs=self.epochs, lr=self.lr, weight_decay=0.0),) if self.epochs else ())
