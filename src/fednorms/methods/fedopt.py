"""FedAdagrad, FedYogi and FedAdam: the server uses the mean update as a gradient and steps adaptively."""

from __future__ import annotations

from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Round


def _start(w: Tree, tau: float) -> tuple[Tree, Tree]:
    return join(m=w.zeros(), v=w.map(lambda t: t.new_full(t.shape, tau * tau))), Tree()


def _moved(m: Tree, v: Tree, lr: float, tau: float) -> tuple[Tree, Tree]:
    return Tree({k: lr * m[k] / (v[k].sqrt() + tau) for k in m}), join(m=m, v=v)


def _momentum(delta: Tree, mine: Tree, beta: float) -> Tree:
    return delta * (1 - beta) + branch(mine, "m") * beta


def _square(delta: Tree) -> Tree:
    return delta.map(lambda d: d * d)


@part("fedadagrad")
class FedAdagrad(Part):
    """Step adaptively: m <- beta1 m + (1 - beta1) delta; v <- v + delta^2; w <- w + lr m / (sqrt(v) + tau).

    Paper: Adaptive Federated Optimization. Reddi et al. ICLR 2021. https://arxiv.org/abs/2003.00295

    Algorithm 2 of the paper; v starts at tau^2, m at 0. Acts on the server's step of the parameters; statistics are
    averaged. Server state: m and v. No client state, no extra communication. Tune lr: the paper's best values are
    between 0.001 and 1.

    >>> FedAdagrad(lr=0.1)
    fedadagrad(lr=0.1)
    """

    paper = "Reddi et al. 2021"

    lr: float = option(0.01, above=0.0)
    beta1: float = option(0.0, at_least=0.0, at_most=1.0)
    tau: float = option(0.001, above=0.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return _start(w, self.tau)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        v = branch(r.mine, "v") + _square(delta)
        return _moved(_momentum(delta, r.mine, self.beta1), v, self.lr, self.tau)


@part("fedyogi")
class FedYogi(Part):
    """Like FedAdagrad with v <- v - (1 - beta2) delta^2 sign(v - delta^2), which changes slowly when delta is small.

    Paper: Adaptive Federated Optimization. Reddi et al. ICLR 2021. https://arxiv.org/abs/2003.00295

    w <- w + lr m / (sqrt(v) + tau), m <- beta1 m + (1 - beta1) delta. Algorithm 2 of the paper; v starts at tau^2, m at
    0, no bias correction. Acts on the server's step of the parameters; statistics are averaged. Server state: m and v.
    No client state, no extra communication.

    >>> FedYogi(lr=0.1)
    fedyogi(lr=0.1)
    """

    paper = "Reddi et al. 2021"

    lr: float = option(0.01, above=0.0)
    beta1: float = option(0.9, at_least=0.0, at_most=1.0)
    beta2: float = option(0.99, at_least=0.0, at_most=1.0)
    tau: float = option(0.001, above=0.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return _start(w, self.tau)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        old, square = branch(r.mine, "v"), _square(delta)
        v = Tree({k: old[k] - (1 - self.beta2) * d2 * (old[k] - d2).sign() for k, d2 in square.items()})
        return _moved(_momentum(delta, r.mine, self.beta1), v, self.lr, self.tau)


@part("fedadam")
class FedAdam(Part):
    """Like FedAdagrad with v <- beta2 v + (1 - beta2) delta^2, which forgets.

    Paper: Adaptive Federated Optimization. Reddi et al. ICLR 2021. https://arxiv.org/abs/2003.00295

    w <- w + lr m / (sqrt(v) + tau), m <- beta1 m + (1 - beta1) delta. Algorithm 2 of the paper; v starts at tau^2, m at
    0, no bias correction. Acts on the server's step of the parameters; statistics are averaged. Server state: m and v.
    No client state, no extra communication.

    >>> FedAdam(lr=0.1)
    fedadam(lr=0.1)
    """

    paper = "Reddi et al. 2021"

    lr: float = option(0.01, above=0.0)
    beta1: float = option(0.9, at_least=0.0, at_most=1.0)
    beta2: float = option(0.99, at_least=0.0, at_most=1.0)
    tau: float = option(0.001, above=0.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return _start(w, self.tau)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        v = branch(r.mine, "v") * self.beta2 + _square(delta) * (1 - self.beta2)
        return _moved(_momentum(delta, r.mine, self.beta1), v, self.lr, self.tau)
