"""FedLC (Zhang et al. 2022) and FedRoD (Chen and Chao 2022): losses that know a client's class counts, slowly."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def counted(y, classes):
    return [sum(int(v) == c for v in y) for c in range(classes)]


def calibrated(logits, y, counts, tau):
    """Minus the mean log of the softmax of z_c - tau n_c^(-1/4), over the classes that the client has."""
    total = 0.0
    for z, c in zip(logits, y.tolist(), strict=True):
        weight = {k: torch.exp(z[k] - tau * n**-0.25) for k, n in enumerate(counts) if n}
        total = total - torch.log(weight[c] / sum(weight.values()))
    return total / len(y)


def balanced(logits, y, counts):
    """Minus the mean log of n_y e^(z_y) / sum_c n_c e^(z_c)."""
    total = 0.0
    for z, c in zip(logits, y.tolist(), strict=True):
        total = total - torch.log(
            counts[c] * torch.exp(z[c]) / sum(n * torch.exp(v) for n, v in zip(counts, z, strict=True))
        )
    return total / len(y)


def _step(parameters, loss, lr):
    with torch.no_grad():
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p -= lr * g


def fedlc(model, clients, plans, lr, tau, classes):
    server = copy.deepcopy(model)
    for plan in plans:
        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            local = copy.deepcopy(server).train()
            for rows in batches:
                loss = calibrated(local(x[rows]), y[rows], counted(y, classes), tau)
                _step(list(local.parameters()), loss, lr)
            states.append(copy.deepcopy(local.state_dict()))
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server


def fedrod(model, features, clients, plans, lr, classes):
    """The server's model and each client's personal classifier; two optimizer steps per batch, as in PFLlib."""
    server = copy.deepcopy(model)
    own = [nn.Linear(model.head.in_features, classes).double() for _ in clients]
    for head in own:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    for plan in plans:
        states = []
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server).train()
            for rows in plan[k]:
                f = features(local, x[rows])
                z = local.head(f)
                _step(list(local.parameters()), balanced(z, y[rows], counted(y, classes)), lr)
                personal = nn.functional.cross_entropy(z.detach() + own[k](f.detach()), y[rows])
                _step(list(own[k].parameters()), personal, lr)
            states.append(copy.deepcopy(local.state_dict()))
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server, own
