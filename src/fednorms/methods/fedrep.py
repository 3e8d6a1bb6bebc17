"""FedRep: a private head, fitted to the current body before the body takes its step."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from fednorms.core.part import Eval, Part, Phase, Route, Slot, option, part
from fednorms.core.views import Context


@part("fedrep")
class FedRep(Part):
    """Train the head for `head_epochs` with the body fixed, then the body with the head fixed; share the body.

    Paper: Exploiting Shared Representations for Personalized Federated Learning. Collins et al. ICML 2021.
    https://arxiv.org/abs/2102.07078

    Acts on routes and on the phases of a round; each phase has a fresh optimizer. Client state: its head. Judged by
    personal models; "adapted" fits the head once more first, as the authors do after the last round.
    Divergence: a widely used port finds no head tensor by name and trains the whole network; this part follows the
    paper.

    >>> FedRep(head_epochs=5)
    fedrep(head_epochs=5)
    """

    paper = "Collins et al. 2021"

    head_epochs: int = option(10, at_least=1)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if slot.head else Route.SHARED

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        first = replace(phases[0], epochs=self.head_epochs, steps=None, train="head")
        return [first, *(replace(p, train="body") for p in phases)]

    @override
    def evaluation(self) -> Eval:
        return Eval(phases=(Phase(epochs=self.head_epochs, train="head"),))
