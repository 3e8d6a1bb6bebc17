"""FRAug, reduced: train the classifier also on features from a shared generator and a private network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, Pass, Route, Slot, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Round, Step
from fednorms.layers.feature_generator import Synthesis, two_layers

if TYPE_CHECKING:
    from fednorms.core.net import Net
    from fednorms.core.surgery import Change


def kernel_discrepancy(a: Tensor, b: Tensor) -> Tensor:
    """Maximum mean discrepancy of two batches with five Gaussian kernels, widths doubling around the mean distance.

    >>> x = torch.randn(6, 3)
    >>> kernel_discrepancy(x, x).abs().item() < 1e-6
    True
    """
    both = torch.cat([a, b])
    distance = (both.unsqueeze(0) - both.unsqueeze(1)).square().sum(2)
    n = len(both)
    width = distance.detach().sum() / (n * n - n) / 4 + 1e-12
    kernel = torch.stack([(-distance / (width * 2**i)).exp() for i in range(5)]).sum(0)
    k = len(a)
    return kernel[:k, :k].mean() + kernel[k:, k:].mean() - 2 * kernel[:k, k:].mean()


@part("fraug")
class FRAug(Part):
    """Train the head on real and synthetic features: (1 - r) CE(real) + r CE(synthetic); reduced form, experimental.

    Paper: FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation. Chen et al. ICCV
    2023. https://arxiv.org/abs/2205.14900

    A shared generator G(z, y) makes features for everybody; a private network turns them into a residual on the
    client's class means m: f = ratio (m + FT(G, y)) + (1 - ratio) m, ratio = exp(gamma (t - T)), r = min(1/2, ratio). f
    trains only the head. G descends CE(head(G)) - lam_g dist(G, m) and FT descends -entropy(head(m + FT)) + lam_ft
    dist(m + FT, m), each at `factor` times the learning rate with all else fixed. Distances are mean L2 norms,
    or for G a kernel discrepancy (distance="mmd"; the authors use lam_g=10 for PACS). Acts on the loss. Client state:
    FT, class means, BatchNorm statistics. Communication: G besides the model.
    Divergence: this is a reduced form. There is one combined gradient per step instead of three in turn; G and FT
    together are clipped apart from the model. Class means are measured at the start of
    a round (momentum 0.3) instead of batch by batch. The authors' numbers are not a target.

    >>> FRAug(distance="mmd", lam_g=10.0)
    fraug(lam_g=10.0, distance='mmd')
    """

    paper = "Chen et al. 2023"
    uses_rounds = True

    latent: int = option(32, at_least=1)
    gamma: float = option(0.01, at_least=0.0)
    lam_g: float = option(1.0, at_least=0.0)
    lam_ft: float = option(1.0, at_least=0.0)
    factor: float = option(5.0, at_least=0.0)
    momentum: float = option(0.3, above=0.0, at_most=1.0)
    distance: Literal["l2", "mmd"] = option("l2", choices=("l2", "mmd"))

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        linear = model.get_submodule(head[0])
        if type(linear) is not nn.Linear or len(head) > 1:
            raise BadInput(
                f"fraug needs one plain linear classifier, got {type(linear).__name__} x {len(head)}. Leave out the "
                "part that changes the head, or choose another model."
            )
        return Synthesis.beside(model, linear, self.latent)

    @override
    def route(self, slot: Slot) -> Route:
        private = slot.name.split(".")[:2] == ["fraug", "local"]
        statistics = is_batchnorm(slot.module) and slot.kind == "buffer"
        return Route.LOCAL if private or statistics else Route.SHARED

    @override
    def lr_factor(self, slot: Slot) -> float | None:
        return self.factor if slot.name.split(".")[0] == "fraug" else None

    @override
    def missing(self, net: Net) -> str | None:
        if type(net.module.get_submodule(net.heads[0])) is not nn.Linear:  # a part behind this one has changed it
            return "plain linear classifier"
        return None if net.head_names <= set(net.trained) else "classifier that trains"

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", self._measure, _unchanged)]

    def _measure(self, local: Local) -> tuple[Tree, Tree]:
        """The client's class means under the model it starts from, and this round's ratio."""
        total, count = torch.zeros(()), torch.zeros(())
        for f, y in local.features():
            member = F.one_hot(y, local.classes).to(f)
            total, count = total.to(f) + member.T @ f, count.to(f) + member.sum(0)
        means = total / count.clamp(min=1).unsqueeze(1)
        if local.mine:
            means = torch.lerp(local.mine["means"], means, self.momentum)
        c = local.context
        return Tree(means=means, ratio=torch.full_like(count[0], math.exp(self.gamma * (c.round - c.rounds)))), Tree()

    @override
    def objective(self, s: Step) -> Tensor:
        real = s.base(s.logits, s.y)
        if (
            len(s.x) < 2 or not s.mine
        ):  # batch normalization of features cannot take one; an unknown client has no means
            return real
        weight, bias = _tensor(s, 2), _tensor(s, 1)
        assert weight is not None
        label = F.one_hot(s.y, weight.shape[0]).to(weight)
        m, ratio = s.mine["means"][s.y], s.mine["ratio"]

        def head(f: Tensor) -> Tensor:
            return F.linear(f, weight.detach(), None if bias is None else bias.detach())

        def localized(w: Tree, f: Tensor) -> Tensor:
            return m + two_layers(w, "fraug.local", torch.cat([f, label], 1), last_relu=False)

        z = s.uniform(len(s.x), self.latent)
        fake = two_layers(s.params, "fraug.generator", torch.cat([z, label], 1), last_relu=True)
        private = localized(s.params, fake.detach())
        mixed = ratio * private.detach() + (1 - ratio) * m
        r = ratio.clamp(max=0.5)
        synthetic = s.base(F.linear(mixed, weight, bias), s.y)
        p = head(private).log_softmax(1)
        generator = s.base(head(fake), s.y) - self.lam_g * self._apart(fake, m)
        privately = (p.exp() * p).sum(1).mean() + self.lam_ft * _norm(private - m)
        return (1 - r) * real + r * synthetic + generator + privately

    def _apart(self, a: Tensor, b: Tensor) -> Tensor:
        return _norm(a - b) if self.distance == "l2" else kernel_discrepancy(a, b)


def _tensor(s: Step, dimensions: int) -> Tensor | None:
    """The head's weight (2) or bias (1)."""
    return next((s.params[n] for n in s.head if s.params[n].dim() == dimensions), None)


def _norm(x: Tensor) -> Tensor:
    return (x.square().sum(1) + 1e-12).sqrt().mean()


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
