"""A bound on the length of an update: no client moves the model much further than the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Received, Weights

MEMORY = 20  # rounds whose medians are kept


@part("normbound")
class NormBound(Part):
    """Shorten a client's update that is longer than a bound: d_k <- d_k min(1, L / |d_k|).

    Paper: Can You Really Backdoor Federated Learning? Sun et al. arXiv 2019. https://arxiv.org/abs/1911.07963

    L is `bound`, or `relative` times the running median of lengths, whichever is smaller; 0 switches one off. The
    running median is that of the last 20 rounds' medians over clients, the present round included; of an even number,
    the smaller of the two in the middle. The update of the parameters and that of the running statistics are two
    vectors, each with its own L. An update that is not longer than L keeps its bits. The paper bounds by a fixed
    number; the relative bound needs no tuning and follows the updates as they become shorter.
    Acts on the server, on what each client sent. Server state: at most 20 numbers per vector. Nothing more to send, but
    the server must see each update. What clients send for other parts is not bounded.

    >>> NormBound(bound=0.5, relative=0)
    normbound(bound=0.5, relative=0.0)
    """

    paper = "Sun et al. 2019"

    bound: float = option(0.0, at_least=0.0)
    relative: float = option(3.0, at_least=0.0)

    @override
    def init(self, w: Weights) -> tuple[Tree, Tree]:
        empty = next(iter(w.values()), torch.zeros(0)).new_zeros(0)
        return Tree(parameters=empty, statistics=empty), Tree()

    @override
    def receive(self, r: Received) -> tuple[Sequence[Tree], Tree]:
        updates, mine = list(r.updates), Tree(r.mine)
        for kind, names in kinds(r).items():
            lengths = [length(u.pick(names)) for u in r.updates]
            medians = [*r.mine[kind].double().tolist(), _middle(lengths)][-MEMORY:]
            mine[kind] = r.mine[kind].new_tensor(medians)
            updates = shortened(updates, names, lengths, self._bound(_middle(medians)))
        return updates, mine

    def _bound(self, usual: float) -> float:
        return min([limit for limit in (self.bound, self.relative * usual) if limit > 0], default=math.inf)


def kinds(r: Received) -> dict[str, tuple[str, ...]]:
    """The names of the parameters and of the running statistics among what is sent, where there are any."""
    parameters = set(r.context.names(lambda slot: slot.kind == "param"))
    found = {
        "parameters": tuple(k for k in r.model if k in parameters),
        "statistics": tuple(k for k in r.model if k not in parameters),
    }
    return {kind: names for kind, names in found.items() if names}


def length(update: Tree) -> float:
    """|d| of an update, in double precision, where squares of large numbers stay finite."""
    return float(update.to(torch.float64).sqnorm().sqrt())


def shortened(updates: list[Tree], names: Sequence[str], lengths: Sequence[float], most: float) -> list[Tree]:
    """The updates with these tensors no longer than `most`; one that is short enough is the same object."""
    return [
        u if long <= most else Tree({**u, **_scaled(u.pick(names), most / long)})
        for u, long in zip(updates, lengths, strict=True)
    ]


def _scaled(update: Tree, by: float) -> Tree:
    return update.map(lambda t: (t.double() * by).to(t))  # a factor of 1e-40 is 0 in single precision


def _middle(values: Sequence[float]) -> float:
    """The median; of an even number of values, the smaller one in the middle: a hostile client of two cannot raise it.

    >>> _middle([3.0, 1.0, 2.0]), _middle([1e6, 1.0])
    (2.0, 1.0)
    """
    return sorted(values)[(len(values) - 1) // 2]
