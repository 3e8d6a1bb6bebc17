"""The two baselines: every client on its own, and all data in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, part

if TYPE_CHECKING:
    from fednorms.data import Federation


@part("standalone")
class Standalone(Part):
    """Train every client on its own from the common first model; nothing is sent (SingleSet, local only).

    Paper: none. This is the lower baseline of most papers.

    Acts on routes: every tensor is local. Client state: its whole model.

    >>> Standalone()
    standalone
    """

    paper = "baseline"
    keeps_all_local = True

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL


@part("centralised")
class Centralized(Part):
    """Pool the training data of all sites and train one model on it; every site still has its own test.

    Paper: none. This is the upper baseline of most papers.

    T rounds of E epochs over the pooled data; the optimizer starts fresh in every round, as everywhere. Acts on the
    federation. Combines with every part that changes model, loss or gradient.

    >>> Centralized()
    centralised
    """

    paper = "baseline"

    @override
    def arrange(self, federation: Federation) -> Federation:
        return federation.pooled("centralised")
