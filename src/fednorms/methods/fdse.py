"""FDSE: filters that all clients share, erasers of skew that similar clients share, and features with one statistic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from fednorms.core.norms import is_batchnorm, keeps_statistics, statistics_of
from fednorms.core.part import Part, Route, Slot, option, part, sum_of_parts
from fednorms.core.simplex import smallest_form
from fednorms.core.surgery import Change
from fednorms.core.tree import Tree, branch, mean
from fednorms.core.views import Context, Received, Step
from fednorms.layers.replacement import finite_momentum
from fednorms.layers.skew_eraser import EraserConv2d, EraserNorm, erase_skew

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("eraser")
class Eraser(Part):
    """Split a layer with T outputs into z = relu(BN(E x)), of T / ratio channels, and y = [z, D z] + b.

    Paper: Federated Learning with Domain Shift Eraser. Wang et al. CVPR 2025. https://arxiv.org/abs/2503.13063
    Code: github.com/WwZzz/FDSE_CVPR25, which this part follows.

    Layers are convolutions and linear layers that a BatchNorm follows. E has their first filters; D is a depthwise
    convolution of kernel x kernel. The statistics of BN stay with the client. Each tensor v of D and of BN's gain and
    shift is mixed for client i over the round's clients: sum_j softmax_j(cos(v_i, v_j) / tau) v_j. A client that is
    away keeps what it was sent last. The server's own, for new sites, and everything else are averaged (in fdse: by
    consensus).
    Acts on layers, routes and the model that each client receives. Client state: the statistics. Server state: the
    mixtures. Sends about 1 / ratio of FedAvg's convolutions.
    Divergence: the program's later version (2026) has no relu here (activate=False); its first version has one. A
    client that takes part for the first time in a later round gets the server's D; the program sends the untrained one.

    >>> Eraser(tau=1.0)
    eraser(tau=1.0)
    """

    paper = "Wang et al. 2025"
    weighting = "uniform"

    tau: float = option(0.5, above=0.0)
    ratio: int = option(2, at_least=2)
    kernel: int = option(3, at_least=1, choices=(1, 3, 5, 7))
    activate: bool = option(True)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return erase_skew(model, head, self.ratio, self.kernel, self.activate)

    @override
    def route(self, slot: Slot) -> Route:
        own = isinstance(slot.module, EraserNorm) and slot.kind == "buffer"
        return Route.LOCAL if own else Route.SHARED

    @override
    def remember(self, r: Received) -> Tree:
        new = {}
        for name in r.context.names(_erases):
            if name not in r.model:
                continue
            rows = torch.stack([m[name].flatten().double() for m in r.models])
            unit = normalize(rows)
            mixed = (unit @ unit.T / self.tau).softmax(1) @ rows
            for client, row in zip(r.clients, mixed, strict=True):
                new[f"{client}/{name}"] = row.view_as(r.model[name]).to(r.model[name])
        return Tree({**r.mine, **new})

    @override
    def model_to(self, model: Tree, mine: Tree, client: str) -> Tree:
        return Tree({**model, **branch(mine, client).pick(model)})


@part("consensus")
class Consensus(Part):
    """Move each tensor by mean_k |d_k| sum_k a_k u_k, u_k = d_k / |d_k|; a >= 0 of sum 1 minimizes |sum_k a_k u_k|.

    Paper: Federated Learning with Domain Shift Eraser. Wang et al. CVPR 2025. https://arxiv.org/abs/2503.13063
    Code: github.com/WwZzz/FDSE_CVPR25, which this part follows.

    d_k is client k's update of the tensor. The sum of unit updates has the same product with each of them that counts,
    so no client's direction is overruled. Running statistics are averaged. Clients count equally.
    Acts on the server, in place of the mean. No state, nothing more to send, but the server must see each update.

    >>> Consensus()
    consensus
    """

    paper = "Wang et al. 2025"
    weighting = "uniform"

    @override
    def aggregate(self, r: Received) -> tuple[Tree, Tree]:
        out = mean(list(r.models), [1.0] * len(r.models))
        if len(r.models) == 1:  # its update is the consensus
            return out, r.mine
        for name in r.context.names(lambda slot: slot.kind == "param"):
            if name in r.model:
                moves = torch.stack([u[name].flatten().double() for u in r.updates])
                lengths = moves.norm(dim=1)
                units = moves / (lengths + 1e-8).unsqueeze(1)
                along = smallest_form(units @ units.T).to(moves.device) @ units
                start = r.model[name]
                out[name] = (start.double() + (lengths.mean() * along).view_as(start)).to(start)
        return out, r.mine


@part("alignstats")
class AlignStatistics(Part):
    """Add lam sum_l w_l (mean_c (g_l - m_l)^2 + (mean_c h_l - mean_c v_l)^2), w_l proportional to e^(beta l).

    Paper: Federated Learning with Domain Shift Eraser. Wang et al. CVPR 2025. https://arxiv.org/abs/2503.13063
    Code: github.com/WwZzz/FDSE_CVPR25, whose first version this part follows.

    g_l and h_l are the received running mean and variance of BatchNorm layer l = 0, 1, ..., those of erasers left out.
    m_l = (1 - rho) r + rho b with rho the layer's momentum, b the batch's mean and r the running mean with the batch
    in it, as a constant; v_l alike. Acts on the loss, from the second round on. No state, no extra communication. The
    program tries lam from 0.001 to 10. lam=0 is FedAvg bit for bit.
    Divergence: the program's b is one number, the mean over channels, and its variance that of the batch's means. Its
    version of 2026 has another distance, (g^2 - m^2) / 2v + (log(v / h) + h / v) / 2, with m and v running over
    channels, layers and steps.

    >>> AlignStatistics(lam=1.0)
    alignstats(lam=1.0)
    """

    paper = "Wang et al. 2025"

    lam: float = option(0.1, at_least=0.0)
    beta: float = option(0.001, at_least=0.0)

    @override
    def missing(self, net: Net) -> str | None:
        sent = any(name in net.statistics and self.watches(slot.module) for name, slot in net.slots.items())
        return None if sent else "BatchNorm layer whose statistics are sent"

    @override
    def watches(self, module: nn.Module) -> bool:
        return is_batchnorm(module) and keeps_statistics(module) and not isinstance(module, EraserNorm)

    @override
    def path(self, c: Context) -> bool:
        return bool(self.lam) and c.round > 0

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.path[self.name] or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        apart = [_apart(s, layer, module) for layer, module in self._layers(s.context) if layer in s.inputs]
        terms = torch.stack(apart)
        weights = torch.softmax(self.beta * torch.arange(len(terms), dtype=terms.dtype, device=terms.device), 0)
        return self.lam * (weights * terms).sum()

    def _layers(self, c: Context) -> Iterator[tuple[str, nn.Module]]:
        for slot in c.slots.values():
            kept = statistics_of(slot.module)
            if kept is not None and slot.leaf == kept.mean and self.watches(slot.module):
                yield slot.name.rpartition(".")[0], slot.module


@sum_of_parts("fdse")
def fdse(
    lam: float = 0.1, tau: float = 0.5, beta: float = 0.001, ratio: int = 2, activate: bool = True
) -> tuple[Part, ...]:
    """FDSE = eraser + consensus + alignstats.

    Paper: Federated Learning with Domain Shift Eraser. Wang et al. CVPR 2025. https://arxiv.org/abs/2503.13063
    Code: github.com/WwZzz/FDSE_CVPR25

    >>> fdse(tau=1.0)
    (eraser(tau=1.0), consensus, alignstats)
    """
    return Eraser(tau=tau, ratio=ratio, activate=activate), Consensus(), AlignStatistics(lam=lam, beta=beta)


def _erases(slot: Slot) -> bool:
    """Whether a tensor is mixed for each client."""
    return slot.kind == "param" and isinstance(slot.module, (EraserNorm, EraserConv2d))


def _apart(s: Step, layer: str, module: nn.Module) -> Tensor:
    """How far a layer's statistics are from those that the server sent."""
    kept = statistics_of(module)
    assert kept is not None
    own = {n.rpartition(".")[2]: t for n, t in {**s.params, **s.buffers}.items() if n.rpartition(".")[0] == layer}
    rate = finite_momentum(module, layer)
    batch = kept.measure(module, own, s.inputs[layer])
    m, v = ((1 - rate) * own[leaf] + rate * new for leaf, new in zip(kept.names, batch, strict=True))
    g, h = (s.start_buffers[f"{layer}.{leaf}"] for leaf in kept.names)
    return (g - m).square().mean() + (h.mean() - v.mean()).square()
