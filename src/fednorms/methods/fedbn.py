"""FedBN: batch normalisation stays with the client."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Route, Slot, option, part


@part("fedbn")
class FedBN(Part):
    """Keep every tensor of every BatchNorm layer (gamma, beta, statistics, counter) local; average the rest.

    Paper: Li et al., FedBN, ICLR 2021. Acts on routes, by module type. Client state: its BN tensors; communication is
    less than FedAvg's. Clients are tested with their own BN. `upload=True` also sends them, so that the server's model
    holds their mean for sites that never trained (the clients still keep their own).
    Divergence: the public code finds layers by the letters "bn" and misses some; averaging is uniform as there.

    >>> FedBN()
    fedbn
    """

    paper = "Li et al. 2021"
    weighting = "uniform"

    upload: bool = option(False)

    @override
    def route(self, slot: Slot) -> Route:
        if not is_batchnorm(slot.module):
            return Route.SHARED
        return Route.SENT if self.upload else Route.LOCAL
