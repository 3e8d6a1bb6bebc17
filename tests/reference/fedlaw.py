"""FedLAW as a loop over clients and steps, with the optimizers written out."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.func import functional_call


def adam(theta, g, memory, rate):
    m, v, t = memory.get("m", torch.zeros_like(theta)), memory.get("v", torch.zeros_like(theta)), memory.get("t", 0) + 1
    m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g * g
    memory.update(m=m, v=v, t=t)
    return theta - rate * (m / (1 - 0.5**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def sgd(theta, g, memory, rate):
    memory["m"] = 0.9 * memory.get("m", torch.zeros_like(theta)) + g
    return theta - rate * memory["m"]


def weights(theta, form):
    each, g = theta[:-1], theta[-1]
    if form == "exp":
        return math.e**g, each.exp() / each.exp().sum()
    return g**2, each**2 / (each**2).sum()


def learn(server, states, sizes, batches, *, form="exp", step=adam, rate=0.01):
    """The new server; `batches[epoch]` are images and labels, and `server` is the module before the round."""
    total = sum(sizes)
    if form == "exp":
        theta = torch.tensor([math.log(n / total) for n in sizes] + [0.0], dtype=torch.float64)
    else:
        theta = torch.tensor([math.sqrt(1 / len(sizes))] * len(sizes) + [1.0], dtype=torch.float64)
    names = [n for n, _ in server.named_parameters()]
    new, memory = copy.deepcopy(server).train(), {}
    for epoch, some in enumerate(batches):
        for x, y in some:
            theta = theta.detach().requires_grad_()
            gamma, lam = weights(theta, form)
            mixed = {n: sum(gamma * lam[k] * states[k][n] for k in range(len(states))) for n in names}
            # The buffers are the module's own, so its running statistics move.
            loss = nn.functional.cross_entropy(functional_call(new, mixed, (x,)), y)
            (g,) = torch.autograd.grad(loss, theta)
            theta = step(theta.detach(), g, memory, rate * 0.5 ** (epoch // 20))
    gamma, lam = weights(theta.detach(), form)
    with torch.no_grad():
        for n, p in new.named_parameters():
            p.copy_(sum(gamma * lam[k] * states[k][n] for k in range(len(states))))
    return new, float(gamma), lam
