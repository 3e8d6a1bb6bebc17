"""FedCM: clients step along a mixture of their gradient and the last round's mean step."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def fedcm(model, clients, plans, lr, alpha, steps):
    """`steps` is the number of local steps by which the mean update is divided."""
    server, direction = copy.deepcopy(model), None
    for plan in plans:
        before = [p.detach().clone() for p in server.parameters()]
        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            local = copy.deepcopy(server).train()
            for rows in batches:
                loss = nn.functional.cross_entropy(local(x[rows]), y[rows])
                grads = torch.autograd.grad(loss, list(local.parameters()))
                with torch.no_grad():
                    for i, (p, g) in enumerate(zip(local.parameters(), grads, strict=True)):
                        old = direction[i] if direction else torch.zeros_like(p)
                        p -= lr * (alpha * g + (1 - alpha) * old)
            states.append(local.state_dict())
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
        direction = [(b - p.detach()) / (lr * steps) for b, p in zip(before, server.parameters(), strict=True)]
    return server
