"""Hybrid batch normalization, 2025: the layer, the statistics pass and the pooling, from the formulas."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from tests.reference.fedavg import average, train


class Hybrid(nn.Module):
    """gamma (x - mu) / sqrt(v + eps) + beta with mu, v mixed from given and batch statistics."""

    def __init__(self, bn: nn.BatchNorm2d):
        super().__init__()
        self.weight = nn.Parameter(bn.weight.detach().clone())
        self.bias = nn.Parameter(bn.bias.detach().clone())
        self.phi = nn.Parameter(torch.zeros_like(bn.weight))
        self.register_buffer("mean", bn.running_mean.clone())
        self.register_buffer("var", bn.running_var.clone())
        self.eps = bn.eps

    def forward(self, x):
        self.seen = x.detach()
        a = torch.sigmoid(self.phi)
        m = x.mean((0, 2, 3))
        v = ((x - m[None, :, None, None]) ** 2).mean((0, 2, 3))
        mu, var = (1 - a) * self.mean + a * m, (1 - a) * self.var + a * v
        scaled = (x - mu[None, :, None, None]) / torch.sqrt(var + self.eps)[None, :, None, None]
        return self.weight[None, :, None, None] * scaled + self.bias[None, :, None, None]


def pooled(means, variances, counts):
    """m = sum n_k m_k / n and v = sum n_k (v_k + (m_k - m)^2) / (n - 1), one channel at a time."""
    n = sum(counts)
    m, v = np.zeros(len(means[0])), np.zeros(len(means[0]))
    for c in range(len(m)):
        m[c] = sum(n_k * m_k[c] for n_k, m_k in zip(counts, means, strict=True)) / n
        terms = zip(counts, means, variances, strict=True)
        v[c] = sum(n_k * (v_k[c] + (m_k[c] - m[c]) ** 2) for n_k, m_k, v_k in terms) / (n - 1)
    return m, v


def hbn(model: nn.Module, clients, plans, lr, rate, batch_size) -> tuple[nn.Module, list[torch.Tensor]]:
    """A network whose one BatchNorm layer is `norm`; returns the server's model and each client's phi."""
    server = copy.deepcopy(model)
    server.norm = Hybrid(server.norm)
    phis = [None] * len(clients)
    for plan in plans:
        states, means, variances = [], [], []
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server).train()
            if phis[k] is not None:
                local.norm.phi.data = phis[k].clone()
            inputs = []
            with torch.no_grad():
                for rows in torch.arange(len(x)).split(batch_size):
                    local(x[rows])
                    inputs.append(local.norm.seen)
            everything = torch.cat(inputs).numpy()
            means.append(everything.mean((0, 2, 3)))
            variances.append(everything.var((0, 2, 3)))
            train(local, x, y, plan[k], lr)
            phis[k] = local.norm.phi.detach().clone()
            states.append(local.state_dict())
        counts = [len(x) for x, _ in clients]
        m, v = pooled(means, variances, counts)
        new = average(states, [float(n) for n in counts])
        new["norm.mean"] = rate * torch.from_numpy(m) + (1 - rate) * server.norm.mean
        new["norm.var"] = rate * torch.from_numpy(v) + (1 - rate) * server.norm.var
        server.load_state_dict(new)
    return server, phis
