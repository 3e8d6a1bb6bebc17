"""LG-FedAvg: private representation layers and shared top layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, option, part

if TYPE_CHECKING:
    from fednorms.core.net import Net

PRESETS = {"LeNet": 2}  # top layers that are shared, by class of the model; others share only the classifier


@part("lgfedavg")
class LGFedAvg(Part):
    """Keep the front ("local") layers at the client and average the top ("global") ones: w_k = (l_k, g).

    Paper: Think Locally, Act Globally: Federated Learning with Local and Global Representations. Liang et al. arXiv
    2020. https://arxiv.org/abs/2001.01523

    `layers` is the number of top weight layers that are shared; 0 uses the preset: two for LeNet, otherwise the
    classifier. `shared` names modules instead, separated by commas; everything in them is shared. A normalization layer
    belongs to the layer before it. Acts on routes. Client state: its front layers. Communication: only the top layers.
    Divergence: the authors' CIFAR network shares its convolutions, against their text; this part follows the text. It
    starts from the common first model, not from a FedAvg checkpoint (give one as `weights` for that).

    >>> LGFedAvg(shared="fc2,head")
    lgfedavg(shared='fc2,head')
    """

    paper = "Liang et al. 2020"

    layers: int = option(0, at_least=0)
    shared: str = option("")

    @override
    def route(self, slot: Slot) -> Route:
        if self.shared:
            return Route.SHARED if any(_within(slot.name, m) for m in self._names()) else Route.LOCAL
        top = self.layers or PRESETS.get(slot.model, 0)
        is_top = slot.layer > slot.layers - top if top else slot.head
        return Route.SHARED if is_top else Route.LOCAL

    @override
    def missing(self, net: Net) -> str | None:
        unknown = [m for m in self._names() if not any(_within(name, m) for name in net.slots)]
        return f'module "{unknown[0]}" with tensors' if unknown else None

    def _names(self) -> list[str]:
        return [m.strip() for m in self.shared.split(",") if m.strip()]


def _within(name: str, module: str) -> bool:
    path = module.split(".")
    return name.split(".")[: len(path)] == path
