"""FedNova: average the clients' updates per step, so a client with more steps does not pull harder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

import torch
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import End, Round

if TYPE_CHECKING:
    from fednorms.core.method import Method
    from fednorms.core.training import Training


@part("fednova")
class FedNova(Part):
    """Send d_k = (w_k - w_t) / a_k; the server moves by (sum p_k a_k) sum p_k d_k.

    Paper: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization. Wang et al. NeurIPS
    2020. https://arxiv.org/abs/2007.07481

    a_k is the sum of the weights that a client's update gives to its gradients: the number of steps K with plain SGD,
    (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) with momentum rho, (1 - (1 - lr mu)^K) / (lr mu) with FedProx's pull,
    counted step by step here; `mu` is by default that of a fedprox in the same method, and a run records it. Acts on
    what is sent and on the server's step; statistics are averaged. No state; one number more to send. With equal steps
    it is FedAvg (or FedProx).
    Divergence: with a proximal term, the authors' program moves by (sum p_k K_k) sum p_k d_k, with the numbers of steps
    K_k > a_k: a longer server step in the same direction. variant="author" does so.

    >>> FedNova(mu=0.1)
    fednova(mu=0.1)
    """

    paper = "Wang et al. 2020"
    uploads = True
    divides_updates = True
    needs_one_model = True
    never_negative = ("a",)

    mu: float | None = option(None, at_least=0.0)
    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def settled(self, method: Method, training: Training) -> Self:
        pull = sum(p.proximal for p in method.parts)
        return replace(self, mu=pull) if self.mu is None and pull else self

    def _a(self, e: End) -> float:
        a = velocity = 0.0
        for _ in range(e.steps):  # of gradients that are all 1: a is how far they carry, in units of lr
            velocity = e.context.momentum * velocity + 1 - e.context.lr * (self.mu or 0.0) * a
            a += velocity
        return a

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        like = next(iter(e.delta.values()), torch.zeros(()))
        steps = self.variant == "author" and self.mu
        return e.mine, Tree(a=like.new_tensor(e.steps if steps else self._a(e)))

    @override
    def send(self, delta: Tree, e: End) -> Tree:
        return delta / self._a(e)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta * r.up["a"] if r.up else delta, r.mine
