"""MOON, Li et al. 2021: three models per step, as separate torch modules."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def contrast(z, near, far, temperature):
    """By the definition, sample by sample."""
    total = 0.0
    for a, b, c in zip(z, near, far, strict=True):
        p = torch.exp((a @ b) / (a.norm() * b.norm()) / temperature)
        q = torch.exp((a @ c) / (a.norm() * c.norm()) / temperature)
        total = total - torch.log(p / (p + q))
    return total / len(z)


def moon(model: nn.Module, features, clients, plans, lr, mu, temperature) -> nn.Module:
    """`features(model, x)` are the penultimate values; `plans[t][k]` batches, None for a client that is left out."""
    server = copy.deepcopy(model)
    previous = [None for _ in clients]
    for plan in plans:
        states, sizes = [], []
        for k, (x, y) in enumerate(clients):
            if plan[k] is None:
                continue
            received, local = copy.deepcopy(server).eval(), copy.deepcopy(server).train()
            for rows in plan[k]:
                z = features(local, x[rows])
                loss = nn.functional.cross_entropy(local.head(z), y[rows])
                if previous[k] is not None:
                    with torch.no_grad():
                        near, far = features(received, x[rows]), features(previous[k], x[rows])
                    loss = loss + mu * contrast(z, near, far, temperature)
                grads = torch.autograd.grad(loss, list(local.parameters()))
                with torch.no_grad():
                    for parameter, g in zip(local.parameters(), grads, strict=True):
                        parameter -= lr * g
            previous[k] = copy.deepcopy(local).eval()
            states.append(local.state_dict())
            sizes.append(float(len(x)))
        server.load_state_dict(average(states, sizes))
    return server
