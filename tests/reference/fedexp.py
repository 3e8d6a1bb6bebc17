"""FedExP, Jhunjhunwala et al. 2023: a server step from the lengths of the clients' updates."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average, train


def step_size(updates: list[torch.Tensor], weights: list[float], eps: float) -> float:
    total = sum(weights)
    lengths = sum(w / total * float(d @ d) for w, d in zip(weights, updates, strict=True))
    together = sum(w / total * d for w, d in zip(weights, updates, strict=True))
    return max(1.0, lengths / (2 * (float(together @ together) + eps)))


def _vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fedexp(model: nn.Module, clients, plans, lr, eps, uniform=False):
    """Returns the server's model, the one before it, and the step sizes."""
    server, previous, sizes = copy.deepcopy(model), None, []
    for plan in plans:
        previous = copy.deepcopy(server)
        weights = [1.0 if uniform else float(len(x)) for x, _ in clients]
        states, updates = [], []
        for (x, y), batches in zip(clients, plan, strict=True):
            local = train(copy.deepcopy(server), x, y, batches, lr)
            states.append(local.state_dict())
            updates.append(_vector(local) - _vector(server))
        sizes.append(step_size(updates, weights, eps))
        new = average(states, weights)
        for name, p in previous.named_parameters():
            new[name] = p.detach() + sizes[-1] * (new[name] - p.detach())
        server.load_state_dict(new)
    return server, previous, sizes
