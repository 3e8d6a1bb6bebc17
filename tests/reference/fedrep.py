"""FedRep, Collins et al. 2021: fit the private head to the body, then step the body under that head."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def _phase(model, x, y, batches, parameters, lr, momentum):
    model.train()
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    for rows in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def fedrep(model: nn.Module, clients, plans, lr, momentum=0.0):
    """`plans[t][k] = (head batches, body batches)`; returns the server's model and the clients' heads."""
    server = copy.deepcopy(model)
    heads = [copy.deepcopy(model.head.state_dict()) for _ in clients]
    for plan in plans:
        states = []
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server)
            local.head.load_state_dict(heads[k])
            head = list(local.head.parameters())
            body = [p for n, p in local.named_parameters() if not n.startswith("head.")]
            _phase(local, x, y, plan[k][0], head, lr, momentum)
            _phase(local, x, y, plan[k][1], body, lr, momentum)
            heads[k] = copy.deepcopy(local.head.state_dict())
            states.append(local.state_dict())
        mean = average(states, [float(len(x)) for x, _ in clients])
        old = server.state_dict()
        server.load_state_dict({n: old[n] if n.startswith("head.") else mean[n] for n in mean})
    return server, heads
