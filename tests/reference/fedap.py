"""FedAP: a matrix of weights from distances of BatchNorm inputs, and one mixture of models per client."""

from __future__ import annotations

import copy

import torch

from tests.reference.fedavg import train


def matrix(model, clients, lam):
    """W, for a network whose only normalization follows its first convolution."""
    found = []
    for x, _ in clients:
        with torch.no_grad():
            z = model.conv(x).transpose(0, 1).flatten(1)
        found.append((z.mean(1), z.var(1, correction=0).sqrt()))
    n = len(clients)
    w = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if i != j:
                (a, s), (b, t) = found[i], found[j]
                w[i, j] = 1 / ((a - b).square().sum() + (s - t).square().sum()).sqrt()
        w[i] *= (1 - lam) / w[i].sum()
        w[i, i] = lam
    return w


def fedap(model, clients, plans, lr, lam):
    """What each client would start the next round from, without its BatchNorm tensors, and the clients' models."""
    w, n = matrix(model, clients, lam), len(clients)
    local = [copy.deepcopy(model) for _ in clients]
    start: list[dict] = [{} for _ in clients]
    for plan in plans:
        for k, (x, y) in enumerate(clients):
            local[k].load_state_dict({**local[k].state_dict(), **start[k]})
            train(local[k], x, y, plan[k], lr)
        sent = [copy.deepcopy(m.state_dict()) for m in local]
        names = [name for name in sent[0] if not name.startswith("norm.")]
        start = [{name: sum(w[i, j] * sent[j][name] for j in range(n)) for name in names} for i in range(n)]
    return start, local
