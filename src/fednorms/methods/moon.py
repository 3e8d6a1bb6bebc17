"""MOON: features near the global model's and away from the client's own previous ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.part import Part, Pass, option, part
from fednorms.core.surgery import Change, swap_heads
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import End, Local, Round, Step
from fednorms.layers.projection import with_projection


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """-log(e^(cos(z, near) / T) / (e^(cos(z, near) / T) + e^(cos(z, far) / T))), mean over the batch.

    >>> z = torch.tensor([[1.0, 0.0]])
    >>> round(contrast(z, z, -z, 0.5).item(), 6), round(contrast(z, z, z, 0.5).item(), 6)
    (0.01815, 0.693147)
    """
    cosine = nn.functional.cosine_similarity
    return nn.functional.softplus((cosine(z, far) - cosine(z, near)) / temperature).mean()


@part("moon")
class MOON(Part):
    """Add mu times a contrast of the features z with the received model's (near) and the client's last one's (far).

    Paper: Model-Contrastive Federated Learning. Li, He and Song. CVPR 2021. https://arxiv.org/abs/2103.16257

    l = CE + mu mean -log(e^(cos(z, z_glob)/T) / (e^(cos(z, z_glob)/T) + e^(cos(z, z_prev)/T))). Both other models are
    frozen and run as in a test, with their own statistics. `projection` > 0 puts an MLP d -> d -> projection before the
    classifier, and z is its output (the authors use 256). Acts on the local loss (three forward passes). Client state:
    its last model. No extra communication.
    Divergence: the first time a client trains there is no last model, and the term is 0 (another port uses the initial
    weights). The default is the form of FedNTD and FedFN: no projection, mu 0.1.

    >>> MOON(mu=5.0, projection=256)
    moon(mu=5.0, projection=256)
    """

    paper = "Li et al. 2021 (MOON)"

    mu: float = option(0.1, at_least=0.0)
    temperature: float = option(0.5, above=0.0)
    projection: int = option(0, at_least=0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change] | None:
        if not self.projection:
            return None
        return swap_heads(self.name, model, head, lambda linear, _: with_projection(linear, self.projection))

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", self._remember, _unchanged)]

    def _remember(self, local: Local) -> tuple[Tree, Tree]:
        """The client's last model; in its first round, a state of the same shape whose flag is 0."""
        known = local.mine or join(model=local.model, seen=Tree(before=_one(local.model) * 0))
        return known, Tree()

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.mu or s.context.evaluating:
            return 0.0
        with torch.no_grad():
            _, near = s.forward(s.start, s.x, mode="evaluate")
            _, far = s.forward(branch(s.mine, "model"), s.x, mode="evaluate")
        return self.mu * s.mine["seen/before"] * contrast(s.features, near, far, self.temperature)

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        return join(model=e.model, seen=Tree(before=_one(e.model))), Tree()


def _one(model: Tree) -> Tensor:
    return torch.ones_like(next(t for t in model.values() if t.is_floating_point()).flatten()[0])


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
