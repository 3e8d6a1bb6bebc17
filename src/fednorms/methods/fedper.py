"""FedPer: a shared body and a private classifier, trained together."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, part


@part("fedper")
class FedPer(Part):
    """Train body and head jointly; send and average the body, keep the head: w_k = (theta, phi_k).

    Paper: Federated Learning with Personalization Layers. Arivazhagan et al. arXiv 2019.
    https://arxiv.org/abs/1912.00818

    Acts on routes. Client state: its head; a client that never trained has the common first one. Communication:
    FedAvg's without the head. BatchNorm layers are sent with the body.
    Divergence: a public script trains a copy and discards its head; here the client keeps it.

    >>> FedPer()
    fedper
    """

    paper = "Arivazhagan et al. 2019"

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if slot.head else Route.SHARED
