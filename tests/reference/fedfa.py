"""FedFA's layer and server, channel by channel."""

from __future__ import annotations

import math

import torch

EPS = 1e-6


def _variance(values):
    n = len(values)
    mean = sum(values) / n
    return sum((v - mean) ** 2 for v in values) / (n - 1)


def factors(between):
    h = [1 / (1 + 1 / (float(v) + EPS)) for v in between]
    return [len(h) * v / sum(h) for v in h]


def augmented(x, between_mean, between_std, noise_mean, noise_std):
    """One pass of a layer that fires; noises are (N, C)."""
    n, channels = x.shape[:2]
    mu = [[float(x[b, c].mean()) for c in range(channels)] for b in range(n)]
    sigma = [[math.sqrt(_variance(x[b, c].flatten().tolist()) + EPS) for c in range(channels)] for b in range(n)]
    out = torch.empty_like(x)
    for c in range(channels):
        wide = [
            math.sqrt((1 + factors(between)[c]) * (_variance([row[c] for row in rows]) + EPS))
            for between, rows in ((between_mean, mu), (between_std, sigma))
        ]
        for b in range(n):
            beta = mu[b][c] + float(noise_mean[b, c]) * wide[0]
            gamma = sigma[b][c] + float(noise_std[b, c]) * wide[1]
            out[b, c] = gamma * (x[b, c] - mu[b][c]) / sigma[b][c] + beta
    return out
