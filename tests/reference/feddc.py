"""FedDC, Gao et al. 2022, as the authors' program does it: drifts, and control variates like SCAFFOLD's."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average
from tests.reference.feddyn import flat, load_flat


def feddc(model: nn.Module, clients, plans, cohorts, lr_0, decay, alpha, mean_steps=None):
    """`mean_steps`: the program's K for every client, with the undecayed rate; None: the steps and rate in force.

    Returns the server's model, c, the drifts and the variates.
    """
    server = copy.deepcopy(model)
    n = len(clients)
    total = sum(len(y) for _, y in clients)
    sizes = [len(y) * n / total for _, y in clients]
    zero = torch.zeros_like(flat(server)).detach()
    c, drifts, variates = zero, [zero] * n, [zero] * n
    for t, (plan, cohort) in enumerate(zip(plans, cohorts, strict=True)):
        lr = lr_0 * decay**t
        w = flat(server).detach()
        thetas, states, changes = [], [], []
        for i in cohort:
            x, y = clients[i]
            u = sizes[i]
            local = copy.deepcopy(server).train()
            for rows in plan[i]:
                local.zero_grad()
                theta = flat(local)
                loss = nn.functional.cross_entropy(local(x[rows]), y[rows])
                loss = loss + alpha / u / 2 * ((theta - (w - drifts[i])) ** 2).sum()
                loss = loss + theta @ (c / u - variates[i])
                loss.backward()
                with torch.no_grad():
                    for p in local.parameters():
                        p -= lr * p.grad
            theta = flat(local).detach()
            drifts[i] = drifts[i] + theta - w
            walked = mean_steps * lr_0 if mean_steps else len(plan[i]) * lr
            new = variates[i] - c / u + (w - theta) / walked
            changes.append(u * (new - variates[i]))
            variates[i] = new
            thetas.append(theta)
            states.append(local.state_dict())
        c = c + sum(changes) / n
        server.load_state_dict(average(states, [1.0] * len(states)))
        load_flat(server, sum(thetas) / len(thetas) + sum(drifts) / n)
    return server, c, drifts, variates
