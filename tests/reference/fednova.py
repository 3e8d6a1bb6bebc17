"""FedNova, Wang et al. 2020: the accumulation vectors of section 4, and the normalized average."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average, train
from tests.reference.feddyn import flat, load_flat


def accumulation(steps: int, momentum: float = 0.0, lr: float = 0.0, mu: float = 0.0) -> list[float]:
    """How much each of a client's gradients counts in its update; momentum and proximal term one at a time."""
    if momentum:
        return [(1 - momentum ** (steps - j)) / (1 - momentum) for j in range(steps)]
    return [(1 - lr * mu) ** (steps - 1 - j) for j in range(steps)]


def fednova(model: nn.Module, clients, plans, lr, momentum=0.0) -> nn.Module:
    server = copy.deepcopy(model)
    total = sum(len(y) for _, y in clients)
    for plan in plans:
        w = flat(server).detach()
        states, direction, effective = [], torch.zeros_like(w), 0.0
        for (x, y), batches in zip(clients, plan, strict=True):
            p = len(y) / total
            local = train(copy.deepcopy(server), x, y, batches, lr, momentum=momentum)
            a = sum(accumulation(len(batches), momentum))
            direction = direction + p * (w - flat(local).detach()) / a
            effective = effective + p * a
            states.append(local.state_dict())
        server.load_state_dict(average(states, [float(len(y)) for _, y in clients]))
        load_flat(server, w - effective * direction)
    return server
