"""FedTAN's first step by its protocol: three exchanges per BatchNorm layer, gradients of statistics averaged by hand.

For the network conv, BN, ReLU, pool, head of the tests, with every derivative that crosses clients written out.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


def first_step_gradients(model: nn.Module, batches):
    """Each client's gradient, by name; `batches` lists (x, y). Statistics are plain means over clients."""
    clients = [copy.deepcopy(model) for _ in batches]
    inputs = [m.conv(x) for m, (x, _) in zip(clients, batches, strict=True)]
    k = len(clients)
    mean = sum(h.detach().mean((0, 2, 3)) for h in inputs) / k  # exchange 1
    var = sum(((h.detach() - mean[:, None, None]) ** 2).mean((0, 2, 3)) for h in inputs) / k  # exchange 2
    leaves, losses, mean_grads, var_grads = [], [], 0, 0
    for m, h, (_, y) in zip(clients, inputs, batches, strict=True):
        local = h.detach().requires_grad_()
        mu, v = mean.clone().requires_grad_(), var.clone().requires_grad_()
        z = (local - mu[:, None, None]) / torch.sqrt(v + m.norm.eps)[:, None, None]
        z = m.norm.weight[:, None, None] * z + m.norm.bias[:, None, None]
        loss = nn.functional.cross_entropy(m.head(m.pool(torch.relu(z)).flatten(1)), y)
        loss.backward()
        mean_grads, var_grads = mean_grads + mu.grad / k, var_grads + v.grad / k  # exchange 3
        leaves.append(local)
        losses.append(loss.detach())
    for h, local in zip(inputs, leaves, strict=True):
        count = h.numel() / h.shape[1]
        deviation = local.detach() - mean[:, None, None]
        h.backward(local.grad + mean_grads[:, None, None] / count + var_grads[:, None, None] * 2 * deviation / count)
    return [{n: p.grad for n, p in m.named_parameters()} for m in clients], mean, var
