"""pFedMe: personal models that minimize the local loss near the client's model, and a client's model that follows."""

from __future__ import annotations

import torch
from typing_extensions import override

from fednorms.core.part import Eval, Part, Pass, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Gradient, Local, Round, Step, Weights


@part("pfedme")
class PFedMe(Part):
    """Step w along lam (w - theta), theta after `inner` steps along grad F(theta) + lam (theta - w) on the same batch.

    Paper: Personalized Federated Learning with Moreau Envelopes. Dinh et al. NeurIPS 2020.
    https://arxiv.org/abs/2006.08848 (code: github.com/CharlieDinh/pFedMe)

    theta <- theta - rate (grad F(theta) + lam (theta - w) + mu theta), from the received model on in every round, and
    from the last theta on in every batch. The server moves by beta times the mean update; beta=1 is the plain mean. A
    client is tested with its theta; running statistics are the server's. Tensors that stay at a client follow
    grad F(theta). Acts on the gradient, with `inner` passes per step, and on the server's step. Client state: theta. No
    extra communication. The recipe's lr is the paper's eta; keep lr lam below 1. The program starts from lam=15,
    rate=0.09 and eta=0.005.
    Divergence: in the program all clients train in every round and a sample of them is averaged, by size; it has
    mu=0.001. Here only the sampled ones train.

    >>> PFedMe(lam=15.0)
    pfedme(lam=15.0)
    """

    paper = "Dinh et al. 2020"
    weighting = "uniform"
    writes_state = True

    lam: float = option(1.0, above=0.0)
    inner: int = option(5, at_least=1)
    rate: float = option(0.05, above=0.0)
    beta: float = option(1.0, above=0.0)
    mu: float = option(0.0, at_least=0.0)

    @override
    def init(self, w: Weights) -> tuple[Tree, Tree]:
        return Tree(), w

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", _from_received, _unchanged)]

    @override
    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        if s.context.evaluating:  # fine-tuning is plain training
            return gradf

        def envelope(w: Tree, draw: int) -> Tree:
            here, theta, g = w.detach(), s.mine, Tree()
            for _ in range(self.inner):
                g = gradf(Tree({**here, **theta.pick(here)}), draw)
                with torch.no_grad():
                    step = g.pick(theta) + (theta - here) * self.lam + theta * self.mu
                    for name, t in step.items():
                        theta[name].sub_(self.rate * t)
            pull = (here.pick(theta) - theta) * self.lam
            return Tree({**g, **pull.pick(g)})

        return envelope

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta if self.beta == 1 else self.beta * delta, r.mine

    @override
    def evaluation(self) -> Eval:
        return Eval(personal_model=lambda model, mine: mine)


def _from_received(local: Local) -> tuple[Tree, Tree]:
    return local.received.pick(local.mine), Tree()


def _unchanged(up: Tree, r: Round) -> Tree:
    return r.mine
