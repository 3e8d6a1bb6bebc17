"""FedTAN: the first local step of a round as if all participants' batches were one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, part

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("fedtan")
class FedTAN(Part):
    """Share batch normalization statistics and their gradients among all participants in a round's first step.

    Paper: Why Batch Normalization Damage Federated Learning on Non-IID Data? Wang, Shi and Chang. IEEE Transactions on
    Neural Networks and Learning Systems 2023. https://arxiv.org/abs/2301.02982

    Layer by layer, m = sum p_i mean(x_i) and v = sum p_i mean((x_i - m)^2) normalize every client's batch, and the
    gradient flows through both. With one local step, the averaged update is that of one network on all batches
    together. Later steps are local, then everything is averaged. Acts on the engine: a simulation that needs all
    participants at once (`joint`). No client state. Communication: 3 exchanges and 4C floats per BatchNorm layer
    besides the model, 3L + 1 exchanges a round.
    Divergence: running variances have the factor M / (M - 1), M values per channel in the local batch; the public code
    has B / (B - 1).

    >>> sorted(FedTAN().requires)
    ['joint']
    """

    paper = "Wang et al. 2023"
    uploads = True  # statistics of every layer, while all clients step together
    weighting = "uniform"
    requires = frozenset({"joint"})

    @override
    def missing(self, net: Net) -> str | None:
        layers = {name: m for name, m in net.module.named_modules() if is_batchnorm(m)}
        for name, m in layers.items():
            if not isinstance(m, _BatchNorm):
                raise BadInput(
                    f'fedtan computes shared statistics in the BatchNorm layers of torch; layer "{name}" of model '
                    f'"{net.name}" is a {type(m).__name__}. Replace it with nn.BatchNorm2d, or leave out fedtan.'
                )
        return None if layers else "BatchNorm layer"
