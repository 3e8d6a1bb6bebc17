"""GReg, algorithm 2: two forward passes per step, and smoothed statistics on the server."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call

from tests.reference.fedavg import average


def symmetric_divergence(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The mean over rows of half KL(p||q) plus half KL(q||p), by the definition of the divergence."""
    p, q = a.softmax(1), b.softmax(1)
    forward = (p * (p.log() - q.log())).sum(1)
    backward = (q * (q.log() - p.log())).sum(1)
    return (forward / 2 + backward / 2).mean()


def _with_statistics(local: nn.Module, sent: dict, x: torch.Tensor) -> torch.Tensor:
    """A forward pass of the same weights normalized with the broadcast statistics."""
    norms = [m for m in local.modules() if isinstance(m, nn.BatchNorm2d)]
    for m in norms:
        m.eval()
    tensors = {**dict(local.named_parameters()), **{k: v.clone() for k, v in sent.items()}}
    out = functional_call(local, tensors, (x,))
    for m in norms:
        m.train()
    return out


def greg(model: nn.Module, clients, plans, lr, alpha, rho) -> nn.Module:
    server = copy.deepcopy(model)
    for t, plan in enumerate(plans):
        sent = {n: b.clone() for n, b in server.named_buffers()}
        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            local = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            for rows in batches:
                optimizer.zero_grad()
                logits = local(x[rows])
                loss = nn.functional.cross_entropy(logits, y[rows])
                if t > 0:
                    loss = loss + alpha * symmetric_divergence(logits, _with_statistics(local, sent, x[rows]))
                loss.backward()
                optimizer.step()
            states.append(local.state_dict())
        new = average(states, [float(len(x)) for x, _ in clients])
        for name, old in sent.items():
            if old.is_floating_point():
                new[name] = (1 - rho) * old + rho * new[name]
        server.load_state_dict(new)
    return server
