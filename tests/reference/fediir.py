"""FedIIR (Guo et al. 2023) as its authors' program runs it, with the mean gradient of the rounds before."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def fediir(model, clients, plans, measured, lr, penalty, ema):
    """`measured[t][k]` are the batches (images, labels) on which client k measures; the model and the mean gradient."""
    server = copy.deepcopy(model)
    mean = [torch.zeros_like(p) for p in server.head.parameters()]
    for plan, batches in zip(plans, measured, strict=True):
        states, sizes, found = [], [], []
        for k, (x, y) in enumerate(clients):
            if plan[k] is None:
                continue
            for images, labels in batches[k]:
                other = copy.deepcopy(server).train()  # its running statistics are thrown away
                loss = nn.functional.cross_entropy(other(images), labels)
                found.append(torch.autograd.grad(loss, list(other.head.parameters())))
            local = copy.deepcopy(server).train()
            for rows in plan[k]:
                loss = nn.functional.cross_entropy(local(x[rows]), y[rows])
                g = torch.autograd.grad(loss, list(local.head.parameters()), create_graph=True)
                loss = loss + penalty * sum((a - b).square().sum() for a, b in zip(g, mean, strict=True))
                local.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for p in local.parameters():
                        p -= lr * p.grad
            states.append(copy.deepcopy(local.state_dict()))
            sizes.append(float(len(x)))
        server.load_state_dict(average(states, sizes))
        new = [sum(g[i] for g in found) / len(found) for i in range(len(mean))]
        mean = [ema * old + (1 - ema) * now for old, now in zip(mean, new, strict=True)]
    return server, mean
