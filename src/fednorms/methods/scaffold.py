"""SCAFFOLD: correct each local gradient by the difference of a global and a client control variate."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from fednorms.part import Part, option, part
from fednorms.tree import Tree
from fednorms.views import End, Round, Step


@part("scaffold")
class Scaffold(Part):
    """Step along g - c_i + c; then c_i <- the client's mean gradient, c <- c + |S|/N mean(c_i+ - c_i).

    Paper: Karimireddy et al., SCAFFOLD, ICML 2020. Option I: c_i+ is the gradient of all local data at w_t (one more
    pass). Option II, control="gradient": the mean of the round's raw gradients, which keeps its meaning under
    clipping, momentum, several phases and other parts; control="difference": c_i - c + (w_t - w) / (K lr), equal under
    plain SGD; with momentum rho, K becomes (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho).
    Acts on the gradient. Client state c_i, server state c, one model each way beside FedAvg's. Uploads are uniform
    means, so that c = mean(c_i) always; models are averaged uniformly. Statistics are never corrected.
    Divergence: FedDC's code divides by the undecayed rate and weights c by client size; we use the rate in force.

    >>> Scaffold(option="I")
    scaffold(option='I')
    """

    paper = "Karimireddy et al. 2020"
    weighting = "uniform"
    reduction = "uniform"
    uses_mean_gradient = True

    control: Literal["gradient", "difference"] = option("gradient", choices=("gradient", "difference"))
    option: Literal["I", "II"] = option("II", choices=("I", "II"))

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), w.zeros()

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        if s.context.evaluating:  # fine-tuning minimises the client's own loss, not the federation's
            return g
        return g - s.mine + s.down

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        if self.option == "I":
            new = e.mine.zeros() + e.gradient(e.start)
        elif self.control == "gradient":
            new = Tree({**e.mine, **e.mean_grad})
        else:
            rho, k = e.context.momentum, e.steps
            steps = (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)
            new = e.mine - e.down - e.delta / (steps * e.context.lr) if e.context.lr else e.mine
        return new, new - e.mine

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta, r.mine + r.up * (r.sampled / r.total)
