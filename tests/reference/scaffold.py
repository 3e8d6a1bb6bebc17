"""SCAFFOLD, Karimireddy et al. 2020, algorithm 1 with option II and server step 1, line by line."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def scaffold(model: nn.Module, clients, plans, cohorts, lr):
    """Returns the server's model, c, and the list of c_i. `plans[t][k]` is None for absent clients."""
    x_server = copy.deepcopy(model)
    names = [n for n, _ in model.named_parameters()]
    c = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    c_clients = [{n: torch.zeros_like(v) for n, v in c.items()} for _ in clients]
    for plan, cohort in zip(plans, cohorts, strict=True):
        states, differences = [], []
        for i in cohort:
            x, y = clients[i]
            local = copy.deepcopy(x_server).train()
            for rows in plan[i]:
                local.zero_grad()
                nn.functional.cross_entropy(local(x[rows]), y[rows]).backward()
                with torch.no_grad():
                    for name, p in local.named_parameters():
                        p -= lr * (p.grad - c_clients[i][name] + c[name])
            here, there = dict(local.named_parameters()), dict(x_server.named_parameters())
            k = len(plan[i])
            new = {n: c_clients[i][n] - c[n] + (there[n].detach() - here[n].detach()) / (k * lr) for n in names}
            differences.append({n: new[n] - c_clients[i][n] for n in names})
            c_clients[i] = new
            states.append(local.state_dict())
        x_server.load_state_dict(average(states, [1.0] * len(states)))
        for n in names:
            c[n] = c[n] + sum(d[n] for d in differences) / len(clients)
    return x_server, c, c_clients


def scaffold_feddc(model: nn.Module, clients, plans, cohorts, lr_0, decay, clip=None):
    """The version in FedDC's repository: a linear loss term, the undecayed rate, relative sizes u_i.

    Every plan has the same number of batches. Returns the server's model, c, and the list of c_i.
    """
    server = copy.deepcopy(model)
    n, total = len(clients), sum(len(y) for _, y in clients)
    sizes = [len(y) * n / total for _, y in clients]
    c = {k: torch.zeros_like(p) for k, p in model.named_parameters()}
    c_clients = [{k: torch.zeros_like(v) for k, v in c.items()} for _ in clients]
    for t, (plan, cohort) in enumerate(zip(plans, cohorts, strict=True)):
        states, changes = [], []
        for i in cohort:
            x, y = clients[i]
            local = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr_0 * decay**t)
            for rows in plan[i]:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(local(x[rows]), y[rows])
                for name, p in local.named_parameters():
                    loss = loss + (p * (c[name] / sizes[i] - c_clients[i][name])).sum()
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(local.parameters(), clip)
                optimizer.step()
            here, there = dict(local.named_parameters()), dict(server.named_parameters())
            walked = len(plan[i]) * lr_0
            new = {k: c_clients[i][k] - c[k] + (there[k] - here[k]).detach() / walked for k in c}
            changes.append({k: sizes[i] * (new[k] - c_clients[i][k]) for k in c})
            c_clients[i] = new
            states.append(local.state_dict())
        server.load_state_dict(average(states, [1.0] * len(states)))
        c = {k: v + sum(d[k] for d in changes) / n for k, v in c.items()}
    return server, c, c_clients
