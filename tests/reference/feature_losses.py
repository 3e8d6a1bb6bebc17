"""Terms of the local loss over features and logits, entry by entry: FedDecorr and FedNTD."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def decorrelation(f, variant):
    n, d = f.shape
    z = torch.stack([(f[:, i] - f[:, i].mean()) / (f[:, i].var() + 1e-8).sqrt() for i in range(d)], 1)
    if variant == "paper":
        return sum((z[:, i] @ z[:, j] / n) ** 2 for i in range(d) for j in range(d)) / d**2
    off = [(z[:, i] @ z[:, j]) ** 2 for i in range(d) for j in range(d) if i != j]
    return sum(off) / len(off) / n


def not_true(logits, known, y, tau):
    total = 0.0
    for row, old, label in zip(logits, known, y.tolist(), strict=True):
        keep = [c for c in range(len(row)) if c != label]
        p, q = (old[keep] / tau).softmax(0), (row[keep] / tau).softmax(0)
        total = total + (p * (p / q).log()).sum()
    return tau**2 * total / len(y)


def fedavg_with(model, clients, plans, lr, term):
    """FedAvg whose clients add `term(local, received, x, y)`; `received` is in eval mode."""
    server = copy.deepcopy(model)
    for plan in plans:
        states = []
        for (x, y), batches in zip(clients, plan, strict=True):
            local, received = copy.deepcopy(server).train(), copy.deepcopy(server).eval()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            for rows in batches:
                seen = []
                hook = local.head.register_forward_pre_hook(lambda m, a, seen=seen: seen.append(a[0]))
                logits = local(x[rows])
                hook.remove()
                with torch.no_grad():
                    known = received(x[rows])
                loss = nn.functional.cross_entropy(logits, y[rows]) + term(logits, seen[0], known, y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            states.append(local.state_dict())
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server
