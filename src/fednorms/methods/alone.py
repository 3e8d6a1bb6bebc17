"""The two ends of the scale: every client alone, and all data in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, part

if TYPE_CHECKING:
    from fednorms.data import Federation


@part("standalone")
class Standalone(Part):
    """Train every client alone from the common start; nothing is sent (SingleSet, local only).

    The papers' lower reference. Acts on routes: every tensor is local. Client state: its whole model.

    >>> Standalone()
    standalone
    """

    paper = "reference"
    keeps_all_local = True

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL


@part("centralised")
class Centralised(Part):
    """Pool the training data of all sites and train one model on it; every site still has its own test.

    The papers' upper reference: T rounds of E epochs over the pooled data, the optimiser starts afresh every round as
    everywhere. Acts on the federation; composes with every part that changes model, loss or gradient.

    >>> Centralised()
    centralised
    """

    paper = "reference"

    @override
    def arrange(self, federation: Federation) -> Federation:
        return federation.pooled("centralised")
