"""FedDyn, Acar et al. 2021: the paper's algorithm with lambda_k and h, and the authors' form with weight decay."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in model.parameters()])


def load_flat(model: nn.Module, vector: torch.Tensor) -> None:
    at = 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(vector[at : at + p.numel()].view_as(p))
            at += p.numel()


def feddyn_paper(model: nn.Module, clients, plans, cohorts, lr, alpha, clip=None):
    """Returns the server's model, h and the list of lambda_k, the last two as long vectors; alpha_k = alpha / u_k."""
    server = copy.deepcopy(model)
    total = sum(len(y) for _, y in clients)
    alphas = [alpha * total / (len(y) * len(clients)) for _, y in clients]
    size = flat(server).numel()
    h = torch.zeros(size, dtype=torch.float64)
    lambdas = [torch.zeros(size, dtype=torch.float64) for _ in clients]
    for plan, cohort in zip(plans, cohorts, strict=True):
        w = flat(server).detach()
        thetas, states = [], []
        for k in cohort:
            x, y = clients[k]
            local = copy.deepcopy(server).train()
            for rows in plan[k]:
                local.zero_grad()
                theta = flat(local)
                loss = nn.functional.cross_entropy(local(x[rows]), y[rows])
                loss = loss - lambdas[k] @ theta + alphas[k] / 2 * ((theta - w) ** 2).sum()
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(local.parameters(), clip)
                with torch.no_grad():
                    for p in local.parameters():
                        p -= lr * p.grad
            theta = flat(local).detach()
            lambdas[k] = lambdas[k] - alphas[k] * (theta - w)
            thetas.append(theta)
            states.append(local.state_dict())
        h = h - alpha / len(clients) * sum(theta - w for theta in thetas)
        server.load_state_dict(average(states, [1.0] * len(states)))
        load_flat(server, sum(thetas) / len(thetas) - h / alpha)
    return server, h, lambdas


def feddyn_code(model: nn.Module, clients, plans, cohorts, lr, alpha, clip=None, weight_decay=0.0, momentum=0.0):
    """Returns the server's model and the clients' histories. The optimizer's weight decay is the quadratic part."""
    server = copy.deepcopy(model)
    total = sum(len(y) for _, y in clients)
    sizes = [len(y) * len(clients) / total for _, y in clients]
    history = [torch.zeros_like(flat(server)).detach() for _ in clients]
    for plan, cohort in zip(plans, cohorts, strict=True):
        w = flat(server).detach()
        thetas, states = [], []
        for k in cohort:
            x, y = clients[k]
            alpha_k = alpha / sizes[k]
            local = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(
                local.parameters(), lr=lr, momentum=momentum, weight_decay=alpha_k + weight_decay
            )
            for rows in plan[k]:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(local(x[rows]), y[rows])
                loss = loss + alpha_k * (flat(local) * (history[k] - w)).sum()
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(local.parameters(), clip)
                optimizer.step()
            theta = flat(local).detach()
            history[k] = history[k] + theta - w
            thetas.append(theta)
            states.append(local.state_dict())
        server.load_state_dict(average(states, [1.0] * len(states)))
        load_flat(server, sum(thetas) / len(thetas) + sum(history) / len(history))
    return server, history
