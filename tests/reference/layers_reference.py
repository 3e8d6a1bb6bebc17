"""Normalization formulas in plain numpy loops, written from the papers; shares no code with the library."""

from __future__ import annotations

import numpy as np


def weight_norm(w: np.ndarray, variant: str, eps: float) -> np.ndarray:
    out = np.empty_like(w)
    for i, filter_ in enumerate(w):
        values = filter_.ravel()
        mean = sum(values) / len(values)
        squares = sum((v - mean) ** 2 for v in values)
        if variant == "paper":
            out[i] = (filter_ - mean) / np.sqrt(squares / len(values) + eps)
        else:
            out[i] = (filter_ - mean) / (np.sqrt(squares / (len(values) - 1)) + eps)
    return out


def scaled_weight(w: np.ndarray, gain: np.ndarray, form: str, eps: float = 1e-4) -> np.ndarray:
    out = np.empty_like(w)
    for i, filter_ in enumerate(w):
        values = filter_.ravel()
        n = len(values)
        mean = sum(values) / n
        var = sum((v - mean) ** 2 for v in values) / (n - 1 if form == "listing" else n)
        out[i] = (filter_ - mean) / np.sqrt(max(var * n, eps)) * gain[i]
    return out


def adaptive_group_norm(
    x: np.ndarray, share: tuple[float, float], groups: int, variant: str, eps: float, gamma, beta
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training forward for x (N, C, H, W) at a given share (bn, gn); also the batch mean and variance."""
    n_images, channels, height, width = x.shape
    positions = height * width
    m_bn, v_bn = np.empty(channels), np.empty(channels)
    for c in range(channels):
        if variant == "paper":
            m_bn[c], v_bn[c] = x[:, c].mean(), x[:, c].var()
        else:
            m_in = [x[n, c].mean() for n in range(n_images)]
            v_in = [x[n, c].var() * positions / (positions - 1) for n in range(n_images)]
            m_bn[c] = np.mean(m_in)
            v_bn[c] = np.mean([v + m**2 for v, m in zip(v_in, m_in, strict=True)]) - m_bn[c] ** 2
    y = np.empty_like(x)
    per = channels // groups
    for n in range(n_images):
        for c in range(channels):
            block = x[n, (c // per) * per : (c // per + 1) * per]
            m_gn, v_gn = block.mean(), block.var()
            if variant == "author":
                v_gn *= block.size / (block.size - 1)
            mean = share[0] * m_bn[c] + share[1] * m_gn
            if variant == "paper":
                sigma = share[0] * np.sqrt(v_bn[c] + eps) + share[1] * np.sqrt(v_gn + eps)
            else:
                sigma = np.sqrt(share[0] * v_bn[c] + share[1] * v_gn + eps)
            y[n, c] = gamma[c] * (x[n, c] - mean) / sigma + beta[c]
    return y, m_bn, v_bn


def hybrid_norm(x: np.ndarray, phi, mean_g, var_g, gamma, beta, eps: float = 1e-5) -> np.ndarray:
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        a = 1 / (1 + np.exp(-phi[c]))
        mean = (1 - a) * mean_g[c] + a * x[:, c].mean()
        var = (1 - a) * var_g[c] + a * x[:, c].var()
        y[:, c] = gamma[c] * (x[:, c] - mean) / np.sqrt(var + eps) + beta[c]
    return y


def mixed_norm(x: np.ndarray, kind: str, lam: float, mean_g, var_g, gamma, beta, eps: float = 1e-5) -> np.ndarray:
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        values = x[:, c]
        own = (values - values.mean()) / np.sqrt(values.var() + eps)
        sent = (values - mean_g[c]) / np.sqrt(var_g[c] + eps)
        if kind == "global":
            z = sent
        elif kind == "ensemble":
            z = (own + sent) / 2
        else:
            mean = (1 - lam) * values.mean() + lam * mean_g[c]
            var = (1 - lam) * values.var() + lam * var_g[c]
            z = (values - mean) / np.sqrt(var + eps)
        y[:, c] = gamma[c] * z + beta[c]
    return y


def adaptive_clip(grad: np.ndarray, weight: np.ndarray, clip: float, eps: float = 1e-3) -> np.ndarray:
    if sum(size > 1 for size in grad.shape) <= 1:
        units = [...]
    else:
        units = list(range(grad.shape[0]))
    out = grad.copy()
    for unit in units:
        bound = clip * max(np.sqrt((weight[unit] ** 2).sum()), eps)
        norm = np.sqrt((grad[unit] ** 2).sum())
        if norm > bound:
            out[unit] = grad[unit] * bound / norm
    return out
