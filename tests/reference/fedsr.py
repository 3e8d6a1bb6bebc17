"""FedSR (Nguyen et al. 2022) with torch.distributions: random features, and a reference per client and class."""

from __future__ import annotations

import copy

import torch
from torch import distributions, nn
from torch.nn import functional as F

from tests.reference.fedavg import average


def terms(z, mean, deviation, y, to_mean, to_raw, scale):
    """Mean length of the samples, and mean divergence from the reference of each sample's class."""
    length, apart = 0.0, 0.0
    for i, c in enumerate(y.tolist()):
        length = length + z[i].square().sum().sqrt() / len(y)
        own = distributions.Normal(scale * mean[i], scale * deviation[i])
        reference = distributions.Normal(to_mean[c], F.softplus(to_raw[c]))
        apart = apart + distributions.kl_divergence(own, reference).sum() / len(y)
    return length, apart


def fedsr(body: nn.Module, gaussian: nn.Linear, head: nn.Linear, clients, plans, lr, l2r, cmi, noise):
    """The server's three modules, and each client's reference (mean, raw deviation, scale)."""
    width, classes = head.in_features, head.out_features
    server = nn.ModuleList([copy.deepcopy(m) for m in (body, gaussian, head)])
    start = [torch.zeros(classes, width), torch.ones(classes, width), torch.ones(())]
    own = [[t.double().requires_grad_() for t in copy.deepcopy(start)] for _ in clients]
    for plan in plans:
        states = []
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server).train()
            parameters = [*local.parameters(), *own[k]]
            for rows in plan[k]:
                out = local[1](local[0](x[rows]))
                mean, deviation = out[:, :width], F.softplus(out[:, width:])
                z = mean + deviation * noise(mean.shape)
                length, apart = terms(z, mean, deviation, y[rows], *own[k])
                loss = F.cross_entropy(local[2](z), y[rows]) + l2r * length + cmi * apart
                with torch.no_grad():
                    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                        p -= lr * g
            states.append(copy.deepcopy(local.state_dict()))
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server, own


def predict(server, x, draws):
    """The mean softmax over the given draws, the same for every image."""
    out = server[1](server[0](x))
    width = out.shape[1] // 2
    mean, deviation = out[:, :width], F.softplus(out[:, width:])
    return sum(server[2](mean + deviation * e).softmax(1) for e in draws) / len(draws)
