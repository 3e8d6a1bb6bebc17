"""Per-FedAvg: train an initialization that is good after one local gradient step."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from typing_extensions import override

from fednorms.core.part import Eval, Part, Phase, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Context, Gradient, Step


@part("perfedavg")
class PerFedAvg(Part):
    """Step along the gradient taken after an inner step: g(w - alpha g(w; D); D').

    Paper: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach. Fallah,
    Mokhtari and Ozdaglar. NeurIPS 2020. https://arxiv.org/abs/2002.07948

    variant="first" drops the second-order term; "exact" subtracts alpha H(w; D'') v, v the outer gradient and H the
    Hessian; "hessian_free" uses (g(w + delta v; D'') - g(w - delta v; D'')) / (2 delta) for H v. alpha=0 and beta=0
    mean the round's own learning rate (in a test: the last round's), for the inner and outer step. Acts on how a
    gradient is computed; two or three batches per step. No state, no extra communication. Tests take one inner step on
    the client's own data first, a plain gradient step as in training.
    Divergence: FedBABU's port adapts to another client's test data and shares momentum; neither is done here.

    >>> PerFedAvg(alpha=0.01)
    perfedavg(alpha=0.01)
    """

    paper = "Fallah et al. 2020"

    alpha: float = option(0.0, at_least=0.0)
    beta: float = option(0.0, at_least=0.0)
    variant: Literal["first", "exact", "hessian_free"] = option("first", choices=("first", "exact", "hessian_free"))
    delta: float = option(0.001, above=0.0)

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        draws = 2 if self.variant == "first" else 3
        return [replace(p, draws=draws, lr=self.beta or p.lr) for p in phases]

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        alpha = self.alpha or s.context.lr

        def meta(w: Tree, draw: int) -> Tree:
            if s.context.evaluating:  # the test's inner step is a plain gradient step
                return gradf(w, draw)
            here = w.detach()
            v = gradf(here - gradf(w, 0) * alpha, 1)
            if self.variant == "first":
                return v
            if self.variant == "exact":
                return v - s.hessian(here, v, 2) * alpha
            ahead, behind = gradf(here + v * self.delta, 2), gradf(here - v * self.delta, 2)
            return v - (ahead - behind) * (alpha / (2 * self.delta))

        return meta

    @override
    def evaluation(self) -> Eval:
        return Eval(phases=(Phase(epochs=None, steps=1, lr=self.alpha or None, plain=True),))
