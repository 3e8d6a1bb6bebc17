"""ATP with BatchNorm written out, so that running statistics are differentiable like any parameter."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Norm(nn.Module):
    """BatchNorm in test mode; it remembers the statistics of its last input."""

    def __init__(self, bn):
        super().__init__()
        self.eps = bn.eps
        self.weight, self.bias = (nn.Parameter(t.detach().clone()) for t in (bn.weight, bn.bias))
        self.running_mean, self.running_var = (
            nn.Parameter(t.detach().clone()) for t in (bn.running_mean, bn.running_var)
        )

    def forward(self, x):
        rows = x.detach().transpose(0, 1).flatten(1)
        self.seen = {"running_mean": rows.mean(1), "running_var": rows.var(1)}
        shape = (1, -1, 1, 1)
        x = (x - self.running_mean.view(shape)) / (self.running_var.view(shape) + self.eps).sqrt()
        return x * self.weight.view(shape) + self.bias.view(shape)


def opened(model):
    """A copy of a network whose BatchNorm layers are `Norm`."""
    found = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            setattr(found.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], Norm(layer))
    return found


def directions(model, x):
    z = model(x)
    entropy = -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()
    named = dict(model.named_parameters())
    grads = dict(zip(named, torch.autograd.grad(entropy, named.values(), allow_unused=True), strict=True))
    for name, layer in model.named_modules():
        for leaf, value in getattr(layer, "seen", {}).items():
            grads[f"{name}.{leaf}"] = named[f"{name}.{leaf}"].detach() - value
    return grads


def moved(model, x, rates):
    """The adapted copy, and where it went."""
    h, new = directions(model, x), copy.deepcopy(model)
    with torch.no_grad():
        for name, p in new.named_parameters():
            p -= rates[name] * h[name]
            if name.endswith("running_var"):
                p.clamp_(min=0)
    return new, h


def learn(model, rates, batches, eta=0.1):
    """A client's rates after its labeled batches."""
    rates = dict(rates)
    for x, y in batches:
        new, h = moved(model, x, rates)
        named = dict(new.named_parameters())
        g = torch.autograd.grad(nn.functional.cross_entropy(new(x), y), list(named.values()))
        for (name, p), one in zip(named.items(), g, strict=True):
            rates[name] = rates[name] + eta * float((one * h[name]).sum()) / p.numel() ** 0.5
    return rates


def answers(model, rates, batches, *, online):
    """The logits of every batch of test images, of which no label is known."""
    found, mean = [], None
    for i, x in enumerate(batches):
        new, _ = moved(model, x, rates)
        if online and mean is not None:
            with torch.no_grad():
                for p, old in zip(new.parameters(), mean.parameters(), strict=True):
                    p.copy_(old * i / (i + 1) + p / (i + 1))
        mean = new
        found.append(new(x).detach())
    return found
