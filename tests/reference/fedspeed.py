"""FedSpeed and FedSMOO, Sun et al. 2023: loops over long vectors, after the authors' program."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def load(model, vector):
    nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def gradient(model, x, y, at=None):
    """The gradient as a vector; away from the weights, running statistics stay."""
    here = model
    if at is not None:
        here = copy.deepcopy(model)
        load(here, at)
    loss = nn.functional.cross_entropy(here(x), y)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(here.parameters()))])


def fedspeed(model, clients, plans, cohorts, lr, lam, rho, alpha=1.0, clip=None, smoo=False):
    """Returns the server's model, all h_k, all mu_k and s. `smoo` is FedSMOO."""
    server = copy.deepcopy(model)
    zero = torch.zeros_like(flat(server))
    h, mu, s = [zero] * len(clients), [zero] * len(clients), zero
    for plan, cohort in zip(plans, cohorts, strict=True):
        start, states, found = flat(server), [], []
        for k in cohort:
            x, y = clients[k]
            local = copy.deepcopy(server).train()
            for rows in plan[k]:
                w = flat(local)
                g = gradient(local, x[rows], y[rows])
                ascent = g - mu[k] - s if smoo else g
                p = rho * ascent / (ascent.norm() + 1e-7)
                if smoo:
                    mu[k] = mu[k] + p - s
                if rho:
                    g = (1 - alpha) * g + alpha * gradient(local, x[rows], y[rows], w + p)
                g = g + lam * (h[k] - start)
                if clip:
                    g = g * min(1.0, clip / (float(g.norm()) + 1e-6))
                load(local, w - lr * (g + lam * w))
            h[k] = h[k] + flat(local) - start
            states.append(local.state_dict())
            found.append(flat(local))
        server.load_state_dict(average(states, [1.0] * len(states)))
        load(server, sum(found) / len(found) + sum(h) / len(h))
        m = sum(mu[k] for k in cohort) / len(cohort)
        s = rho * m / (m.norm() + 1e-7)
    return server, h, mu, s
