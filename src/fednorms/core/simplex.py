"""Weights that minimize a quadratic form: non-negative, with sum 1."""

from __future__ import annotations

import torch
from torch import Tensor


def smallest_form(p: Tensor) -> Tensor:
    """The weights a >= 0 with sum(a) = 1 that minimize a^T P a, P symmetric without negative eigenvalues, in float64.

    An active set as in Lawson and Hanson's non-negative least squares: a is x / sum(x), x >= 0 the minimizer of
    x^T P x / 2 - sum(x). A tiny multiple of the identity makes P regular, so equal rows get equal weights.

    >>> smallest_form(torch.diag(torch.tensor([1.0, 3.0]))).numpy().round(6).tolist()
    [0.75, 0.25]
    >>> smallest_form(torch.tensor([[1.0, 2.0], [2.0, 5.0]])).tolist()
    [1.0, 0.0]
    """
    p = p.detach().double().cpu()
    n = len(p)
    scale = float(p.diagonal().abs().max())
    if not scale:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    p = p / scale + 1e-8 * torch.eye(n, dtype=torch.float64)
    x, free = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.bool)
    for _ in range(3 * n):
        gain = 1 - p @ x
        gain[free] = 0
        if float(gain.max()) <= 1e-10:
            break
        free[gain.argmax()] = True
        while True:
            inside = free.nonzero().flatten()
            wanted = torch.zeros_like(x)
            wanted[inside] = torch.linalg.solve(p[inside][:, inside], torch.ones(len(inside), dtype=torch.float64))
            if bool((wanted[inside] > 0).all()):
                x = wanted
                break
            falling = inside[wanted[inside] <= 0]
            step = (x[falling] / (x[falling] - wanted[falling])).min()
            x = x + step * (wanted - x)
            free &= x > 1e-15
    return x / x.sum()
