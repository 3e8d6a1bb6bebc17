"""Local training that takes each gradient at a perturbed point: SAM, ASAM, and FedLESAM's estimate."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def gradient(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    return torch.autograd.grad(loss, list(model.parameters()))


def away(model, steps, x, y):
    """The gradient at the weights plus `steps`; running statistics stay."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p, e in zip(other.parameters(), steps, strict=True):
            p += e
    return gradient(other, x, y)


def length(tensors):
    return torch.cat([t.flatten() for t in tensors]).norm()


def sam(model, x, y, rho):
    g = gradient(model, x, y)
    n = length(g)
    return away(model, [rho * t / n for t in g], x, y)


def asam(model, x, y, rho, eta):
    g = gradient(model, x, y)
    sizes = [p.detach().abs() + eta if name.endswith("weight") else 1.0 for name, p in model.named_parameters()]
    n = length([t * s for t, s in zip(g, sizes, strict=True)])
    return away(model, [rho * s * s * t / n for t, s in zip(g, sizes, strict=True)], x, y)


def train(model, batches, x, y, lr, take):
    model.train()
    for rows in batches:
        g = take(model, x[rows], y[rows])
        with torch.no_grad():
            for p, t in zip(model.parameters(), g, strict=True):
                p -= lr * t
    return model


def fedsam(model, clients, plans, lr, take):
    server = copy.deepcopy(model)
    for plan in plans:
        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            states.append(train(copy.deepcopy(server), batches, x, y, lr, take).state_dict())
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server


def fedlesam(model, clients, plans, cohorts, lr, rho):
    """`cohorts[t]` are the numbers of the clients of round t."""
    server, received = copy.deepcopy(model), {}
    for plan, cohort in zip(plans, cohorts, strict=True):
        states = []
        for k in cohort:
            x, y = clients[k]
            now = [p.detach().clone() for p in server.parameters()]
            if k in received:
                uphill = [old - new for old, new in zip(received[k], now, strict=True)]
                n = length(uphill)
                steps = [rho * t / n for t in uphill]

                def take(m, a, b, steps=steps):
                    other = copy.deepcopy(m)
                    with torch.no_grad():
                        for p, e in zip(other.parameters(), steps, strict=True):
                            p += e
                    g = gradient(other, a, b)
                    for name, t in m.named_buffers():  # the only pass records the statistics
                        t.copy_(dict(other.named_buffers())[name])
                    return g
            else:
                take = gradient
            received[k] = now
            states.append(train(copy.deepcopy(server), plan[k], x, y, lr, take).state_dict())
        server.load_state_dict(average(states, [float(len(clients[k][0])) for k in cohort]))
    return server
