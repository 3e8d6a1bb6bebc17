"""FedBN: batch normalization stays with the client."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Route, Slot, option, part


@part("fedbn")
class FedBN(Part):
    """Keep every tensor of every BatchNorm layer (gamma, beta, statistics, counter) local; average the rest.

    Paper: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. Li et al. ICLR 2021.
    https://arxiv.org/abs/2102.07623

    Acts on routes, by module type. Client state: its BatchNorm tensors. Sends less than FedAvg. Clients are tested with
    their own BatchNorm layers. With `upload=True` they also send them: the server's model then holds the mean for sites
    that never trained, while clients keep their own.
    Divergence: the public code finds layers by the letters "bn" in their names and misses some. Averaging is uniform,
    as in that code.

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
