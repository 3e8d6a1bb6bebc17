"""FedAvg as McMahan et al. 2017 describe it: deep copies, torch.optim, loss.backward, a mean of state dicts."""

from __future__ import annotations

import copy

import torch
from torch import nn


def average(states: list[dict], weights: list[float]) -> dict:
    """The weighted mean of floating entries; integer counters are the first client's."""
    total = sum(weights)
    out = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            out[name] = sum(w / total * s[name] for w, s in zip(weights, states, strict=True))
        else:
            out[name] = first.clone()
    return out


def train(model: nn.Module, x, y, batches, lr, momentum=0.0, weight_decay=0.0, clip=None, extra=None):
    """Plain local training; `extra(model)` adds a term to the loss."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    for rows in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        if extra is not None:
            loss = loss + extra(model)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def fedavg(model: nn.Module, clients, plans, lr, uniform=False, **settings) -> nn.Module:
    """`plans[t][k]` lists the rows of every batch of client k in round t."""
    server = copy.deepcopy(model)
    for plan in plans:
        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            local = train(copy.deepcopy(server), x, y, batches, lr, **settings)
            states.append(local.state_dict())
        weights = [1.0 if uniform else float(len(x)) for x, _ in clients]
        server.load_state_dict(average(states, weights))
    return server
