"""APFL and pFedMe: the global model, and personal ones that clients train in the same steps."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average
from tests.reference.fedspeed import flat, gradient, load


def apfl(model, clients, plans, lr, alpha, adaptive=False):
    """Returns the server's model, all v_k and all alpha_k."""
    server = copy.deepcopy(model)
    v, alphas = [flat(server) for _ in clients], [alpha] * len(clients)
    for plan in plans:
        states = []
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server).train()
            for rows in plan[k]:
                w = flat(local)
                g = gradient(local, x[rows], y[rows])
                mixed = gradient(local, x[rows], y[rows], alphas[k] * v[k] + (1 - alphas[k]) * w)
                slope = float((v[k] - w) @ mixed)
                v[k] = v[k] - lr * alphas[k] * mixed
                if adaptive:
                    alphas[k] = min(max(alphas[k] - lr * slope, 0.0), 1.0)
                load(local, w - lr * g)
            states.append(local.state_dict())
        server.load_state_dict(average(states, [float(len(y)) for _, y in clients]))
    return server, v, alphas


def pfedme(model, clients, plans, lr, lam, inner, rate, beta, mu):
    """Returns the server's model and all theta_k; `lr` is eta."""
    server = copy.deepcopy(model)
    thetas = [flat(server) for _ in clients]
    for plan in plans:
        start, states, found = flat(server), [], []
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server).train()
            w, theta = start, start
            for rows in plan[k]:
                for number in range(inner):
                    at = copy.deepcopy(local)  # its first pass records the running statistics
                    load(at, theta)
                    loss = nn.functional.cross_entropy(at(x[rows]), y[rows])
                    g = torch.cat([t.reshape(-1) for t in torch.autograd.grad(loss, list(at.parameters()))])
                    if number == 0:
                        recorded = dict(at.named_buffers())
                    theta = theta - rate * (g + lam * (theta - w) + mu * theta)
                for name, t in local.named_buffers():
                    t.copy_(recorded[name])
                w = w - lr * lam * (w - theta)
            thetas[k] = theta
            states.append(local.state_dict())
            found.append(w)
        server.load_state_dict(average(states, [1.0] * len(states)))
        load(server, (1 - beta) * start + beta * sum(found) / len(found))
    return server, thetas
