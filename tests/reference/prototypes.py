"""FedProto (Tan et al. 2022), FedPLVM (Wang et al. 2024) and FPL (Huang et al. 2023), slowly: loops over samples."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.reference.fedavg import average


def _step(model, loss, lr):
    with torch.no_grad():
        for parameter, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            parameter -= lr * g


def _by_class(model, features, x, y):
    model.eval()
    with torch.no_grad():
        f = features(model, x)
    return {c: [f[i] for i in range(len(y)) if int(y[i]) == c] for c in sorted(set(y.tolist()))}


# -- FedProto -------------------------------------------------------------------------------------------------------
def fedproto(model: nn.Module, features, clients, plans, lr, lam, plain=False):
    """The clients' models and the last global prototypes."""
    models, prototypes = [copy.deepcopy(model) for _ in clients], {}
    for plan in plans:
        found = {}
        for k, (x, y) in enumerate(clients):
            models[k].train()
            for rows in plan[k]:
                f = features(models[k], x[rows])
                loss = nn.functional.cross_entropy(models[k].head(f), y[rows])
                for i, row in enumerate(rows):
                    c = int(y[row])
                    if c in prototypes:
                        loss = loss + lam * ((f[i] - prototypes[c]) ** 2).mean() / len(rows)
                _step(models[k], loss, lr)
            for c, members in _by_class(models[k], features, x, y).items():
                found.setdefault(c, []).append((len(members), sum(members) / len(members)))
        for c, pairs in found.items():
            weights = [1 if plain else n for n, _ in pairs]
            prototypes[c] = sum(w * p for w, (_, p) in zip(weights, pairs, strict=True)) / sum(weights)
    return models, prototypes


# -- FedPLVM --------------------------------------------------------------------------------------------------------
def finch(points: list[torch.Tensor]) -> list[list[int]]:
    """Clusters as lists of row numbers, with all three kinds of links written out."""
    clusters = [[i] for i in range(len(points))]
    first = True
    while len(clusters) > 1:
        means = [sum(points[i] for i in c) / len(c) for c in clusters]
        n = len(means)
        kappa = []
        for i in range(n):
            others = [j for j in range(n) if j != i]
            kappa.append(max(others, key=lambda j: float(_cosine(means[i], means[j]))))
        linked = {(i, j) for i in range(n) for j in range(n) if kappa[i] == j or kappa[j] == i or kappa[i] == kappa[j]}
        seen, merged = set(), []
        for i in range(n):
            if i in seen:
                continue
            component, todo = [], [i]
            while todo:
                a = todo.pop()
                if a not in seen:
                    seen.add(a)
                    component.append(a)
                    todo += [b for b in range(n) if (a, b) in linked and b not in seen]
            merged.append(sorted(row for a in component for row in clusters[a]))
        if len(merged) == n or (len(merged) == 1 and not first):
            break
        clusters, first = merged, False
    return sorted(clusters)


def _cosine(a, b):
    return (a @ b) / (a.norm() * b.norm())


def _means(points):
    return [sum(points[i] for i in c) / len(c) for c in finch(points)]


def plvm_loss(f, y, prototypes, alpha, tau):
    """Contrast plus correction, mean over the samples whose class has prototypes."""
    terms = []
    for a, c in zip(f, y.tolist(), strict=True):
        if c not in prototypes:
            continue
        score = {
            k: [torch.exp(_cosine(a, g).clamp(1e-4, 1) ** alpha / tau) for g in gs] for k, gs in prototypes.items()
        }
        contrast = -torch.log(sum(score[c]) / sum(s for many in score.values() for s in many))
        centre = sum(prototypes[c]) / len(prototypes[c])
        terms.append(contrast + 2 * (_cosine(a, centre) - 1) ** 2)
    return sum(terms) / len(terms) if terms else 0.0


def fedplvm(model: nn.Module, features, clients, plans, lr, lam, alpha, tau) -> nn.Module:
    server, prototypes = copy.deepcopy(model), {}
    for plan in plans:
        states, pool = [], {}
        for k, (x, y) in enumerate(clients):
            local = copy.deepcopy(server).train()
            for rows in plan[k]:
                f = features(local, x[rows])
                loss = nn.functional.cross_entropy(local.head(f), y[rows])
                if prototypes:
                    loss = loss + lam * plvm_loss(f, y[rows], prototypes, alpha, tau)
                _step(local, loss, lr)
            states.append(copy.deepcopy(local.state_dict()))
            for c, members in _by_class(local, features, x, y).items():
                pool.setdefault(c, []).extend(_means(members))
        prototypes = {c: _means(ps) for c, ps in pool.items()}
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server


# -- FPL ------------------------------------------------------------------------------------------------------------
def fpl_loss(f, y, prototypes, tau):
    """Contrast plus squared distance, over the samples whose class has prototypes, divided by the batch's size."""
    total = 0.0
    for a, c in zip(f, y.tolist(), strict=True):
        if c in prototypes:
            score = {k: sum(torch.exp(_cosine(a, g) / tau) for g in gs) for k, gs in prototypes.items()}
            centre = sum(prototypes[c]) / len(prototypes[c])
            total = total - torch.log(score[c] / sum(score.values())) + ((a - centre) ** 2).mean()
    return total / len(y)


def fpl(model: nn.Module, features, clients, plans, lr, lam, tau):
    """The server's model and the prototypes of the last round."""
    server, prototypes = copy.deepcopy(model), {}
    for plan in plans:
        states, sizes, pool = [], [], {}
        for batches, (x, y) in zip(plan, clients, strict=True):
            if batches is None:
                continue
            local = copy.deepcopy(server).train()
            for rows in batches:
                f = features(local, x[rows])
                loss = nn.functional.cross_entropy(local.head(f), y[rows])
                _step(local, loss + lam * fpl_loss(f, y[rows], prototypes, tau), lr)
            states.append(copy.deepcopy(local.state_dict()))
            sizes.append(float(len(x)))
            for c, members in _by_class(local, features, x, y).items():
                pool.setdefault(c, []).append(sum(members) / len(members))
        prototypes = {c: _means(ps) for c, ps in pool.items()}
        server.load_state_dict(average(states, sizes))
    return server, prototypes
