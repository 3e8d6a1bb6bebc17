"""Ditto, Li et al. 2021, algorithm 1: FedAvg, and a personal model pulled toward the received one."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def _train(model, x, y, batches, lr, anchor, lam):
    """v <- v - lr (grad F(v) + lam (v - anchor))."""
    model.train()
    for rows in batches:
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for v, g, w in zip(model.parameters(), grads, anchor, strict=True):
                v -= lr * (g + lam * (v - w))
    return model


def ditto(model: nn.Module, clients, plans, lr, lam):
    """`plans[t][k]`: batches; returns the server's model and the personal ones."""
    server = copy.deepcopy(model)
    personal = [copy.deepcopy(model) for _ in clients]
    for plan in plans:
        states = []
        received = [p.detach().clone() for p in server.parameters()]
        for k, (x, y) in enumerate(clients):
            states.append(_train(copy.deepcopy(server), x, y, plan[k], lr, received, 0.0).state_dict())
            _train(personal[k], x, y, plan[k], lr, received, lam)
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server, personal
