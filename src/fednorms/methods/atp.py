"""ATP: learn in the federation how fast every tensor should adapt to unlabeled test images."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.norms import is_plain_batchnorm, statistics_of
from fednorms.core.part import Eval, Part, Pass, Phase, Slot, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Context, Local, Round, Unlabeled


@part("atp")
class ATP(Part):
    """Before answering a batch of test images, move each tensor: w_l <- w_l - a_l h_l, with learned rates a.

    Paper: Adaptive Test-Time Personalization for Federated Learning. Bao et al. NeurIPS 2023.
    https://arxiv.org/abs/2310.18816 (code: github.com/baowenxuan/ATP)

    h of a parameter is the gradient of the predictions' mean entropy, in test mode; h of BatchNorm's running mean or
    variance is its value minus that of the batch (variances stay >= 0). No label is seen. Every parameter tensor and
    statistic has its own rate, at first 0. From round `after * T` on the model no longer changes, and clients learn the
    rates on labeled validation images: for every batch, a_l <- a_l + eta <grad CE(w - a h), h>_l / sqrt(d_l) with d_l
    entries; the server takes their mean. `after=0` with the recipe's weights= adapts a model that is already trained,
    as the authors do. Every test batch starts from the same model, or with online=True is answered by the mean of the
    models adapted to all batches of the site so far. Batches are as large as in training; the mode
    "global/test-time:20" uses batches of 20, and "global/global" tests without adaptation.
    Acts on the plan, a pass before training, the server's step, and evaluation. Server state and communication: one
    number per tensor. after=1 is FedAvg. List it after parts with a server step, as in "fedavgm + atp": one that comes
    later moves the resting model.
    Divergence: a client without validation images learns on its training images.

    >>> ATP(online=True)
    atp(online=True)
    """

    paper = "Bao et al. 2023"
    uploads = True
    uses_rounds = True

    after: float = option(0.5, at_least=0.0, at_most=1.0)
    eta: float = option(0.1, at_least=0.0)
    online: bool = option(False)

    @override
    def path(self, c: Context) -> bool:
        return c.round >= int(self.after * c.rounds + 1e-9)  # 0.29 * 100 is slightly below 29

    @override
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        return [] if self.path(c) else phases

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta.zeros() if self.path(r.context) else delta, r.mine

    @override
    def stats(self, delta: Tree, r: Round) -> Tree:
        return delta.zeros() if self.path(r.context) else delta

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def passes(self) -> list[Pass]:
        return [Pass("before", self._learn, _latest, reduce="uniform")]

    def _learn(self, local: Local) -> tuple[Tree, Tree]:
        """The rates after a pass over the client's held-out images; the received ones in rounds before `after`."""
        w = local.model.pick(local.context.names(_adapts))
        rates = local.down["rates"] if local.down else next(iter(w.values())).new_zeros(len(w))
        if not self.path(local.context):
            return Tree(), Tree(rates=rates)
        sizes = torch.tensor([t.numel() for t in w.values()]).to(rates)
        for x, y in local.batches(local.context.batch_size, held_out=True):
            h = _directions(w, Unlabeled(x, local.model, local.context, local.down, local.mine, local.tested))
            point = _moved(w, h, rates, local.context).map(lambda t: t.detach().requires_grad_())
            with torch.enable_grad():
                logits, _ = local.tested(Tree({**local.model, **point}), x)
                g = torch.autograd.grad(local.base(logits, y), list(point.values()), allow_unused=True)
            gains = [_dot(one, t) for one, t in zip(g, h.values(), strict=True)]
            rates = rates + self.eta * torch.stack(gains) / sizes.sqrt()
        return Tree(), Tree(rates=rates)

    @override
    def evaluation(self) -> Eval:
        return Eval(adapt=self._adapt)

    def _adapt(self, batch: Unlabeled, memory: Tree) -> tuple[Tree, Tree]:
        if not batch.down or not batch.down["rates"].any():  # at first
            return Tree(), memory
        w = batch.model.pick(batch.context.names(_adapts))
        moved = _moved(w, _directions(w, batch), batch.down["rates"], batch.context)
        if not self.online:
            return moved, memory
        done = memory["batches"] if memory else batch.down["rates"].new_zeros(())
        if memory:
            moved = branch(memory, "mean") * (done / (done + 1)) + moved * (1 / (done + 1))
        return moved, Tree({**join(mean=moved), "batches": done + 1})


def _adapts(slot: Slot) -> bool:
    """Parameters, and the means and variances of BatchNorm."""
    kept = statistics_of(slot.module)
    statistic = kept is not None and slot.leaf in kept.names and is_plain_batchnorm(slot.module)
    return slot.trainable or statistic


def _is_variance(slot: Slot) -> bool:
    kept = statistics_of(slot.module)
    return kept is not None and slot.leaf == kept.var


def _directions(w: Tree, batch: Unlabeled) -> Tree:
    """h: where entropy falls, and how far stored statistics are from the batch's."""
    point = w.map(lambda t: t.detach().requires_grad_())
    with torch.enable_grad():
        logits, recorded = batch.tested(Tree({**batch.model, **point}), batch.x)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        g = torch.autograd.grad(entropy, list(point.values()), allow_unused=True)
    falls = {n: torch.zeros_like(w[n]) if one is None else one for n, one in zip(point, g, strict=True)}
    return Tree({n: w[n] - recorded[n] if n in recorded else t for n, t in falls.items()})


def _moved(w: Tree, h: Tree, rates: Tensor, c: Context) -> Tree:
    """The tensors w - a h, without negative variances."""
    moved = Tree({n: t - a * h[n] for (n, t), a in zip(w.items(), rates, strict=True)})
    return Tree({**moved, **moved.pick(c.names(_is_variance)).map(lambda t: t.clamp(min=0))})


def _dot(g: Tensor | None, h: Tensor) -> Tensor:
    return h.new_zeros(()) if g is None else (g * h).sum()


def _latest(up: Tree, r: Round) -> Tree:
    return up
