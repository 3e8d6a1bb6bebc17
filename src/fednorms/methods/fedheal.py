"""FedHEAL: drop updates that keep changing direction, and weigh clients by how far they moved."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Slot, option, part
from fednorms.core.tree import Tree, branch
from fednorms.core.views import Received


@part("fedheal")
class FedHEAL(Part):
    """Average each entry over the clients that move it consistently, weighted by p_k <- p_k + the client's distance.

    Paper: Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity. Chen et al. CVPR 2024.
    https://arxiv.org/abs/2405.16585 (code: github.com/yuhangchen0/FedHEAL)

    An entry of a client's update counts if the client has moved it in this direction in more than the share tau of its
    earlier rounds; in its first round all count. Where nobody counts, the server's entry stays. d_k is the sum over
    tensors of the norms of the counted update; dp_k <- (1 - beta) dp_k + beta d_k / sum_j d_j, p_k <- p_k + dp_k from
    1 / (clients of its first round), and weights are divided by their sum. The authors use tau=0.3, beta=0.4.
    Acts on clients' weights and on aggregation. Server state: per client, how often each entry rose, p and dp. No extra
    communication, but the server must see each update.
    Divergence: a client's rounds are counted where it took part, and d is divided by the sum over the round's clients.
    The program counts all rounds, and also sums distances of clients that are away.

    >>> FedHEAL(tau=0.4)
    fedheal(tau=0.4)
    """

    paper = "Chen et al. 2024"
    sets_weights = True

    tau: float = option(0.3, at_least=0.0, at_most=1.0)
    beta: float = option(0.4, at_least=0.0, at_most=1.0)

    @override
    def weigh(self, r: Received) -> tuple[list[float], Tree]:
        params = [n for n in r.context.names(_is_param) if n in r.model]
        if not params:  # a method may share no tensor
            return [1.0] * len(r.clients), r.mine
        lengths = [
            [(u[n] * mask[n] if mask else u[n]).norm() for n in params]
            for u, mask in zip(r.updates, self._masks(r), strict=True)
        ]
        far = torch.stack([torch.stack(found).sum() for found in lengths])
        share = far / far.sum() if far.sum() > 0 else torch.full_like(far, 1 / len(far))
        new: dict[str, Tensor] = {}
        weights = []
        for i, client in enumerate(r.clients):
            change = (1 - self.beta) * r.mine.get(f"change/{client}", torch.zeros_like(share[i])) + self.beta * share[i]
            weight = r.mine.get(f"weight/{client}", torch.full_like(share[i], 1 / len(far))) + change
            new |= {f"change/{client}": change, f"weight/{client}": weight}
            weights.append(float(weight))
        return weights, Tree({**r.mine, **new})

    @override
    def aggregate(self, r: Received) -> tuple[Tree, Tree]:
        out: dict[str, Tensor] = {}
        masks, weights = self._masks(r), torch.tensor(r.weights, dtype=torch.float64)
        for name, before in r.model.items():
            count = [m[name].double() if m else torch.ones_like(before, dtype=torch.float64) for m in masks]
            parts = torch.stack([w * c for w, c in zip(weights.to(before.device), count, strict=True)])
            total = parts.sum(0)
            parts = parts / total.where(total > 0, 1.0)
            moves = torch.stack([u[name].double() for u in r.updates])
            out[name] = (before.double() + (parts * moves).sum(0)).to(before)
        return Tree(out), Tree({**r.mine, **self._history(r)})

    def _masks(self, r: Received) -> list[Tree]:
        """Per client, which entries count, as zeros and ones; an empty tree before it has a history."""
        masks = []
        for client, update in zip(r.clients, r.updates, strict=True):
            rose = branch(r.mine, f"rose/{client}").pick(update)
            masks.append(Tree({n: self._counts(update[n], rose[n]) for n in update}) if rose else Tree())
        return masks

    def _counts(self, update: Tensor, rose: Tensor) -> Tensor:
        same = torch.where(update <= 0, 1 - rose, rose)  # no move counts as one down, as in the program
        return (same > self.tau).to(update)

    def _history(self, r: Received) -> dict[str, Tensor]:
        """How often each entry has risen, as a share of the client's rounds."""
        new: dict[str, Tensor] = {}
        moved = zip(r.clients, r.updates, strict=True) if r.model else ()
        for client, update in moved:
            n = r.mine.get(f"rounds/{client}", torch.zeros_like(next(iter(update.values())).flatten()[0]))
            rose = branch(r.mine, f"rose/{client}").pick(update)
            for name, t in update.items():
                now = (t > 0).to(t)
                new[f"rose/{client}/{name}"] = (rose[name] * n + now) / (n + 1) if rose else now
            new[f"rounds/{client}"] = n + 1
        return new


def _is_param(slot: Slot) -> bool:
    return slot.kind == "param"
