"""SCAFFOLD: correct each local gradient by the difference of a global and a client control variate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from typing_extensions import override

from fednorms.core.part import Part, Phase, Weighting, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Context, End, Round, Step

if TYPE_CHECKING:
    from fednorms.core.method import Method
    from fednorms.core.training import Training


@part("scaffold")
class Scaffold(Part):
    """Step along g - c_i + c; then c_i <- the client's mean gradient, c <- c + |S|/N mean(c_i+ - c_i).

    Paper: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. Karimireddy et al. ICML 2020.
    https://arxiv.org/abs/1910.06378

    Option I: c_i+ is the gradient of all local data at w_t (one more pass). Option II, control="difference": c_i+ =
    c_i - c + (w_t - w) / (K lr), as in the paper and in both programs below; with momentum rho, K becomes (K - rho
    (1 - rho^K) / (1 - rho)) / (1 - rho). It needs SGD whose momentum starts fresh in every round, and one phase of
    training at the round's rate; it includes clipping and weight decay. control="gradient": the mean of the round's
    raw gradients, which is equal with plain SGD and can be used with every optimizer and plan, but leaves out
    clipping and weight decay. control="auto" is "difference" where that can be used, otherwise "gradient"; a run
    records which. Version 0.1 used "gradient", and recipes that it wrote are read that way.
    Acts on the gradient. Client state: c_i. Server state: c. Communication: one model more each way than FedAvg.
    Uploads are uniform means, so c = mean(c_i) always; models are averaged uniformly. Statistics are never corrected.
    Divergence: two published programs differ, both with option II by difference. variant="feddc": the gradient of the
    loss term <w, c/u_i - c_i> is added (u_i the client's relative size), every client takes K = E ceil(mean n / B)
    steps, c_i+ divides by K and the first round's rate, c <- c + 1/N sum u_i (c_i+ - c_i). variant="fedntd": K as above
    with momentum, models weighted by size. The default uses the current steps and rate.

    >>> Scaffold(option="I")
    scaffold(option='I')
    """

    paper = "Karimireddy et al. 2020"
    uploads = True
    reduction = "uniform"

    control: Literal["auto", "gradient", "difference"] = option("auto", choices=("auto", "gradient", "difference"))
    variant: Literal["paper", "feddc", "fedntd"] = option("paper", choices=("paper", "feddc", "fedntd"))
    option: Literal["I", "II"] = option("II", choices=("I", "II"))

    @property
    def weighting(self) -> Weighting:  # type: ignore[override]
        """The weighting of models; other uploads are always uniform means."""
        return "size" if self.variant == "fedntd" else "uniform"

    @property
    def by_gradient(self) -> bool:
        """Whether c_i+ is the mean of the round's raw gradients."""
        return self.variant == "paper" and self.option == "II" and self.control == "gradient"

    @property
    def uses_mean_gradient(self) -> bool:  # type: ignore[override]
        """Whether `finish` reads the mean gradient."""
        return self.by_gradient

    @property
    def divides_updates(self) -> bool:  # type: ignore[override]
        """Whether c_i+ comes from the difference of two models."""
        return self.variant != "paper" or (self.option == "II" and self.control != "gradient")

    @override
    def settled(self, method: Method, training: Training) -> Self:
        if self.control != "auto" or self.variant != "paper" or self.option == "I":
            if self.divides_updates:
                method.check_phases(self, training)
            return self
        fresh = training.optimizer == "sgd" and not (training.keep_momentum and training.momentum)
        exact = fresh and not method.phasing(training)
        return replace(self, control="difference" if exact else "gradient")

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        if self.variant != "feddc":
            return phases
        return [replace(p, epochs=None, steps=c.mean_steps) for p in phases]

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return w.zeros(), w.zeros()

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def grad(self, g: Tree, s: Step) -> Tree:
        if s.context.evaluating:  # fine-tuning minimizes the client's own loss, not the federation's
            return g
        return g - s.mine + (s.down / s.context.relative if self.variant == "feddc" else s.down)

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        if self.variant == "feddc":
            new = self._difference(e, e.steps * e.context.lr_0)
            return new, (new - e.mine) * e.context.relative
        if self.variant == "paper" and self.option == "I":
            new = e.mine.zeros() + e.gradient(e.start)
        elif self.by_gradient:
            new = Tree({**e.mine, **e.mean_grad})
        else:
            new = self._difference(e, e.effective_steps * e.context.lr)
        return new, new - e.mine

    def _difference(self, e: End, walked: float) -> Tree:
        return e.mine - e.down - e.context.per_rate(e.delta) / walked if walked else e.mine

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta, r.mine + r.up * (r.sampled / r.total)
