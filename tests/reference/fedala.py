"""FedALA as its authors' module runs it: two models per client, and a third for learning the weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average, train


def learn(local, received, weights, batches, names, eta, first, threshold):
    """The learned weights; `local` and `received` are models, `batches` pairs of images and labels."""
    old, new = dict(local.named_parameters()), dict(received.named_parameters())
    trial, losses = copy.deepcopy(received), []

    def place():
        with torch.no_grad():
            for n in names:
                dict(trial.named_parameters())[n].copy_(old[n] + (new[n] - old[n]) * weights[n])

    place()
    while True:
        for x, y in batches:
            model = copy.deepcopy(trial).train()  # statistics stay
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            for n in names:
                g = dict(model.named_parameters())[n].grad
                weights[n] = (weights[n] - eta * g * (new[n] - old[n])).detach().clamp(0, 1)
            place()
        losses.append(float(loss.detach()))
        settled = len(losses) > 10 and torch.tensor(losses[-10:]).std(correction=0) < threshold
        if not first or settled or len(losses) == 100:
            return weights


def fedala(model, clients, plans, batches, lr, eta, names, threshold=0.1):
    """`batches[t][k]` are those on which client k learns in round t; the server's model after the rounds."""
    server, local, weights = copy.deepcopy(model), {}, {}
    for t, plan in enumerate(plans):
        states = []
        for k, (x, y) in enumerate(clients):
            start = copy.deepcopy(server)
            if k in local:
                first = k not in weights
                if first:
                    weights[k] = {n: torch.ones_like(p) for n, p in server.named_parameters() if n in names}
                weights[k] = learn(local[k], server, weights[k], batches[t][k], names, eta, first, threshold)
                with torch.no_grad():
                    for n, p in start.named_parameters():
                        if n in names:
                            own = dict(local[k].named_parameters())[n]
                            p.copy_(own + (p - own) * weights[k][n])
            local[k] = train(start, x, y, plan[k], lr)
            states.append(copy.deepcopy(local[k].state_dict()))
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server, weights
