"""FedSR: simple representations, random features that are short and say little about an image besides its class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.surgery import Change, swap_heads
from fednorms.core.views import Step
from fednorms.layers.gaussian_linear import GaussianFeatures, GaussianLinear, moments, with_gaussian


def divergence(mean: Tensor, deviation: Tensor, to_mean: Tensor, to_deviation: Tensor) -> Tensor:
    """KL(N(mean, deviation^2) || N(to_mean, to_deviation^2)) of diagonal Gaussians, mean over the rows.

    >>> one, zero = torch.ones(1, 2), torch.zeros(1, 2)
    >>> divergence(zero, one, zero, one).item(), divergence(one, one, zero, one).item()
    (0.0, 1.0)
    """
    terms = (to_deviation / deviation).log() + (deviation**2 + (mean - to_mean) ** 2) / (2 * to_deviation**2) - 0.5
    return terms.sum(1).mean()


@part("fedsr")
class FedSR(Part):
    """Classify z ~ N(m, s^2), m and s of the image; add l2r mean |z| + cmi mean KL(N(C m, (C s)^2) || r_y).

    Paper: FedSR: A Simple and Effective Domain Generalization Method for Federated Learning. Nguyen, Torr and Lim.
    NeurIPS 2022. https://openreview.net/forum?id=mrt90D00aQX (code: github.com/atuannguyen/FedSR)

    A linear layer before the classifier gives m and s = softplus(.), each of `dim` features (0: as many as it gets).
    r_y is a Gaussian per class, C a number; both are trained. Training draws one z per image; a test averages the
    softmax over `samples` draws, the same for all images, and with samples=0 uses m. The authors have l2r=0.01, and
    cmi=0.001 for PACS. Acts on the head and the loss. Communication: the new layer, r and C.
    Client state: its own r and C, as in the program. The server averages them too, for clients that join later;
    predictions do not use them, so all clients' models predict alike.
    Divergence: the authors put the new layer in place of a pretrained network's classifier and train a new classifier.

    >>> FedSR(l2r=0.05)
    fedsr(l2r=0.05)
    """

    paper = "Nguyen et al. 2022"

    l2r: float = option(0.01, at_least=0.0)
    cmi: float = option(0.001, at_least=0.0)
    dim: int = option(0, at_least=0)
    samples: int = option(20, at_least=0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        def made(linear: nn.Linear, name: str) -> nn.Module:
            return with_gaussian(linear, self.dim or linear.in_features, self.samples, name)

        return swap_heads(self.name, model, head, made)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.SENT if _is_reference(slot) else Route.SHARED

    @override
    def loss(self, s: Step) -> Tensor | float:
        if s.context.evaluating or not (self.l2r or self.cmi):  # fine-tuning minimizes the client's own loss
            return 0.0
        layer = next(slot.module for slot in s.context.slots.values() if isinstance(slot.module, GaussianLinear))
        mean, deviation = moments(s.features)
        to_mean, raw, scale = (s.params[n] for n in s.context.names(_is_reference))
        length = torch.linalg.vector_norm(layer.sample_again(s.features), dim=1).mean()
        apart = divergence(mean * scale, deviation * scale, to_mean[s.y], F.softplus(raw)[s.y])
        return self.l2r * length + self.cmi * apart


def _is_reference(slot: Slot) -> bool:
    """The reference's mean and deviation, and the scale, in this order."""
    return isinstance(slot.module, GaussianFeatures) and slot.leaf in ("reference_mean", "reference_deviation", "scale")
