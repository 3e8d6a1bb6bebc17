"""FBN (Guerraoui et al. 2024) for a network whose one BatchNorm2d is `norm`: constants in training, exact pooling."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average, train


class Constant(nn.Module):
    """Normalize with given statistics and remember every training input."""

    def __init__(self, bn: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.bias, self.eps = bn.weight, bn.bias, bn.eps
        self.mean, self.var = bn.running_mean.clone(), bn.running_var.clone()
        self.inputs = []

    def forward(self, x):
        self.inputs.append(x.detach())
        scaled = (x - self.mean[None, :, None, None]) / torch.sqrt(self.var + self.eps)[None, :, None, None]
        return self.weight[None, :, None, None] * scaled + self.bias[None, :, None, None]


def fbn(model: nn.Module, clients, plans, lr, rho):
    """The server's weights and statistics after the rounds in `plans`."""
    server = copy.deepcopy(model)
    server.norm = Constant(server.norm)
    for plan in plans:
        states, moments = [], []
        for (x, y), batches in zip(clients, plan, strict=True):
            local = copy.deepcopy(server)
            local.norm.inputs = []
            train(local, x, y, batches, lr)
            states.append(local.state_dict())
            seen = torch.cat(local.norm.inputs).transpose(0, 1).flatten(1)
            moments.append((len(x), seen.mean(1), seen.var(1, unbiased=False)))
        n = sum(k for k, _, _ in moments)
        mean = sum(k * m for k, m, _ in moments) / n
        var = sum(k * (v + (m - mean) ** 2) for k, m, v in moments) / (n - 1)
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
        server.norm.mean = (1 - rho) * server.norm.mean + rho * mean
        server.norm.var = (1 - rho) * server.norm.var + rho * var
    return server
