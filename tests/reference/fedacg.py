"""FedACG as its authors' program runs it: the server keeps w and m, and sends w + lam m."""

from __future__ import annotations

import copy

import torch

from tests.reference.fedavg import average, train


def fedacg(model, clients, plans, lr, lam, beta):
    """The server's model w after each round."""
    w = copy.deepcopy(model)
    m = {name: torch.zeros_like(p) for name, p in w.named_parameters()}
    for plan in plans:
        ahead = copy.deepcopy(w)
        with torch.no_grad():
            for name, p in ahead.named_parameters():
                p += lam * m[name]
        start = {name: p.detach().clone() for name, p in ahead.named_parameters()}

        def pull(net, start=start):
            return beta / 2 * sum((p - start[name]).square().sum() for name, p in net.named_parameters())

        states = [
            train(copy.deepcopy(ahead), x, y, batches, lr, extra=pull).state_dict()
            for (x, y), batches in zip(clients, plan, strict=True)
        ]
        mean = average(states, [float(len(x)) for x, _ in clients])
        for name in m:
            m[name] = lam * m[name] + mean[name] - start[name]
        w.load_state_dict(mean)
    return w
