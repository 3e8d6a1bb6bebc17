"""FedPAC, Xu, Tong and Huang 2023: class means of features, and classifiers mixed by a quadratic form."""

from __future__ import annotations

import copy
from itertools import combinations

import torch
from torch import nn

from tests.reference.fedavg import average


def best_weights(p):
    """The minimum of a^T P a over the simplex: the best of all supports on which the weights are positive."""
    n = len(p)
    best, found = float("inf"), None
    for size in range(1, n + 1):
        for chosen in combinations(range(n), size):
            rows = list(chosen)
            x = torch.linalg.lstsq(p[rows][:, rows], torch.ones(size, dtype=p.dtype), driver="gelsd").solution
            a = torch.zeros(n, dtype=p.dtype)
            a[rows] = x / x.sum()
            if bool((a >= 0).all()) and float(a @ p @ a) < best:
                best, found = float(a @ p @ a), a
    return found


def features(model, x):
    model.eval()
    with torch.no_grad():
        return model.pool(torch.relu(model.norm(model.conv(x)))).flatten(1)


def statistics(model, x, y, classes):
    """h^y = p(y) mean feature of y, and V."""
    f, n = features(model, x), len(y)
    h = torch.zeros(classes, f.shape[1], dtype=f.dtype)
    v = 0.0
    for c in range(classes):
        own = f[y == c]
        if len(own):
            p, mean = len(own) / n, own.mean(0)
            h[c] = p * mean
            v += p * float(torch.trace(own.T @ own / len(own))) - p**2 * float(mean @ mean)
    return h, v / n


def mixing_weights(h, v):
    """Row i: the weights of client i."""
    rows, n = [], len(h)
    for i in range(n):
        d = torch.zeros(n, n, dtype=h[0].dtype)
        for j in range(n):
            for k in range(n):
                d[j, k] = sum((h[i][c] - h[j][c]) @ (h[i][c] - h[k][c]) for c in range(len(h[i])))
        a = best_weights(torch.diag(torch.tensor(v, dtype=d.dtype)) + d)
        a = torch.where(a > 1e-3, a, 0.0)
        rows.append(a / a.sum())
    return rows


def steps(model, x, y, batches, lr, head, means=None, lam=0.0):
    model.train()
    moving = [p for name, p in model.named_parameters() if name.startswith("head") == head]
    for rows in batches:
        f = model.pool(torch.relu(model.norm(model.conv(x[rows])))).flatten(1)
        loss = nn.functional.cross_entropy(model.head(f), y[rows])
        if means is not None:
            loss = loss + lam * nn.functional.mse_loss(f, torch.stack([means[int(c)] for c in y[rows]]))
        for p, g in zip(moving, torch.autograd.grad(loss, moving), strict=True):
            with torch.no_grad():
                p -= lr * g


def fedpac(model, clients, plans, lr, lam, head_lr, classes):
    """`plans[t][k]`: the batches of both phases. Returns the server's model, the clients' heads and the class means."""
    server, means = copy.deepcopy(model), None
    heads = [copy.deepcopy(model.head.state_dict()) for _ in clients]
    for plan in plans:
        states, h, v, sums = [], [], [], {}
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server)
            local.head.load_state_dict(heads[k])
            found = statistics(local, x, y, classes)
            h.append(found[0])
            v.append(found[1])
            steps(local, x, y, plan[k][0], head_lr, head=True)
            steps(local, x, y, plan[k][1], lr, head=False, means=means, lam=lam)
            f = features(local, x)
            for c in range(classes):
                total, count = sums.get(c, (0.0, 0))
                sums[c] = total + f[y == c].sum(0), count + int((y == c).sum())
            states.append(copy.deepcopy(local.state_dict()))
        server.load_state_dict(average(states, [float(len(y)) for _, y in clients]))
        means = {c: total / count for c, (total, count) in sums.items() if count}
        for k, a in enumerate(mixing_weights(h, v)):
            for name in heads[k]:
                heads[k][name] = sum(w * s[f"head.{name}"] for w, s in zip(a, states, strict=True))
    return server, heads, means
