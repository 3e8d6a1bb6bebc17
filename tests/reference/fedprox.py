"""FedProx, Li et al. 2020: the local loss plus mu/2 times the squared distance to the received model."""

from __future__ import annotations

import copy

from torch import nn

from tests.reference.fedavg import average, train


def fedprox(model: nn.Module, clients, plans, lr, mu) -> nn.Module:
    server = copy.deepcopy(model)
    for plan in plans:
        anchor = [p.detach().clone() for p in server.parameters()]

        def pull(local, anchor=anchor):
            terms = [((p - a) ** 2).sum() for p, a in zip(local.parameters(), anchor, strict=True)]
            return mu / 2 * sum(terms)

        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            states.append(train(copy.deepcopy(server), x, y, batches, lr, extra=pull).state_dict())
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server
