"""FedRoD: one classifier for all, trained as if classes were balanced, and a personal one on top at each client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from fednorms.core.part import Part, Pass, Route, Slot, part
from fednorms.core.surgery import Change, swap_heads
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Round, Step
from fednorms.layers.personal_linear import PersonalLinear

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("fedrod")
class FedRoD(Part):
    """Train the shared model on loss(z + log n) and a personal head P on loss(z + P f), z and f fixed; test z + P f.

    Paper: On Bridging Generic and Personalized Federated Learning for Image Classification. Chen and Chao. ICLR 2022.
    https://arxiv.org/abs/2107.00778 (the authors' repository is empty; compared with github.com/TsingZ0/PFLlib)

    z are the logits of the shared classifier for features f, and n the client's number of images of each class: the
    balanced softmax. A class that the client does not have leaves it. The second loss trains P only. Acts on the head
    and the loss. Client state: P, and n, counted once. The server's P stays 0: its model, and that of a new client, is
    the generic one. Communication: P is sent, and not used.
    Divergence: P starts at 0; in PFLlib it is first a copy of the classifier. The variant with a network that generates
    P for new clients is left out.

    >>> FedRoD()
    fedrod
    """

    paper = "Chen and Chao 2022"

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap_heads(self.name, model, head, PersonalLinear)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.SENT if _is_personal(slot) else Route.SHARED

    @override
    def missing(self, net: Net) -> str | None:
        return None if any(_is_personal(net.slots[n]) for n in net.trained) else "classifier that trains"

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", _count, _unchanged)]

    @override
    def objective(self, s: Step) -> Tensor:
        if not s.mine or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return s.base(s.logits, s.y)
        n = s.mine["count"]
        return s.base(s.logits + torch.where(n > 0, n.clamp(min=1).log(), -1e4), s.y)  # e^-10000 is 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        own = [s.params[n] for n in s.context.names(_is_personal)]
        personal = F.linear(s.features.detach(), own[0], own[1] if len(own) > 1 else None)
        return s.base(s.logits.detach() + personal, s.y)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        own = set(r.context.names(_is_personal))
        return Tree({name: t for name, t in delta.items() if name not in own}), r.mine


def _is_personal(slot: Slot) -> bool:
    return isinstance(slot.module, PersonalLinear) and slot.leaf in ("personal_weight", "personal_bias")


def _count(local: Local) -> tuple[Tree, Tree]:
    """The client's number of images of each class, counted in its first round."""
    return local.mine or Tree(count=local.class_counts), Tree()


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
