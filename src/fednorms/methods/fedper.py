"""FedPer: a shared body under a private classifier, trained together."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, part


@part("fedper")
class FedPer(Part):
    """Train body and head jointly; send and average the body, keep the head: w_k = (theta, phi_k).

    Paper: Arivazhagan et al., Federated learning with personalization layers, 2019. Acts on routes. Client state: its
    head; a client that never trained has the common first one. Communication: less than FedAvg by the head. BN layers
    travel with the body.
    Divergence: a public script trains a copy and drops the head again; here the client keeps it (D2).

    >>> FedPer()
    fedper
    """

    paper = "Arivazhagan et al. 2019"

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if slot.head else Route.SHARED
