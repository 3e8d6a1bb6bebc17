"""Measure how sites differ, from what may leave them; each measure says what it means and what it reveals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fednorms.advice.summaries import SMALL, Moments, SiteSummary


@dataclass(frozen=True)
class Measure:
    """A number about a federation: what it means, what a site reveals for it, and its values per site or layer.

    `value` is None where it cannot be measured; `says` then has the reason.
    """

    name: str
    value: float | None
    says: str
    reveals: str
    parts: Mapping[str, float | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**vars(self), "parts": dict(self.parts)}


def label_skew(sites: Sequence[SiteSummary]) -> list[Measure]:
    """Distance of the sites' class frequencies from the pooled ones: total variation and Hellinger, 0 to 1.

    TV = sum_c |p_k(c) - p(c)| / 2, H = sqrt(1 - sum_c sqrt(p_k(c) p(c))); mean over sites, weighted by images.
    """
    counts = {s.site: [max(n or 0, 0) for n in s.counts] for s in sites}
    pooled = [sum(column) for column in zip(*counts.values(), strict=True)]
    all_of_them = sum(pooled)
    tv: dict[str, float | None] = {}
    hellinger: dict[str, float | None] = {}
    for site, mine in counts.items():
        if not sum(mine):
            tv[site] = hellinger[site] = None
            continue
        pairs = [(a / sum(mine), b / all_of_them) for a, b in zip(mine, pooled, strict=True)]
        tv[site] = sum(abs(a - b) for a, b in pairs) / 2
        hellinger[site] = math.sqrt(max(0.0, 1 - sum(math.sqrt(a * b) for a, b in pairs)))
    weights = {site: float(sum(mine)) for site, mine in counts.items()}
    reveals = f"class counts of each site; those below {SMALL} are not sent"
    return [
        Measure("label_tv", _mean(tv, weights), "label skew, total variation (0 equal, 1 disjoint)", reveals, tv),
        Measure("label_hellinger", _mean(hellinger, weights), "label skew, Hellinger distance", reveals, hellinger),
    ]


def feature_shift(sites: Sequence[SiteSummary]) -> list[Measure]:
    """Gaussian W2^2 between a site's and the pooled statistics of every layer, relative to the pooled variance.

    W2^2 = sum_ch (m_k - m)^2 + (s_k - s)^2, divided by sum_ch s^2; mean over sites by images, then over layers. Within
    classes, a site's class is compared with the same class at all sites that have it, so label skew does not count.
    """
    overall: dict[str, float | None] = {}
    within: dict[str, float | None] = {}
    for layer in sites[0].layers:
        pooled = _pooled([s.layers[layer] for s in sites])
        scale = float(pooled.var.sum())
        apart = {s.site: _w2(s.layers[layer], pooled, scale) for s in sites}
        overall[layer] = _mean(apart, {s.site: float(s.images) for s in sites})
        within[layer] = _within_classes(sites, layer, scale)
    measured = [v for v in within.values() if v is not None]
    reveals = "means and variances of every channel after one round of FedAvg"
    says = "feature shift, Gaussian W2^2 over layers, relative to the variance"
    shared = "feature shift within classes, which label skew does not change"
    if not measured:
        shared += f" (not measured: no class has {SMALL} images at two sites)"
    small = f"the same per class; classes with fewer than {SMALL} images at a site are not sent"
    return [
        Measure("feature_w2", _mean(overall, dict.fromkeys(overall, 1.0)), says, reveals, overall),
        Measure("feature_w2_class", _mean(within, dict.fromkeys(within, 1.0)), shared, small, within),
    ]


def _within_classes(sites: Sequence[SiteSummary], layer: str, scale: float) -> float | None:
    found: dict[str, float | None] = {}
    weights: dict[str, float] = {}
    for c in sorted({c for s in sites for c in s.by_class.get(layer, {})}):
        having = {s.site: s.by_class[layer][c] for s in sites if c in s.by_class.get(layer, {})}
        if len(having) < 2:
            continue
        pooled = _pooled(list(having.values()))
        for site, moments in having.items():
            found[f"{site}/{c}"], weights[f"{site}/{c}"] = _w2(moments, pooled, scale), moments.count
    return _mean(found, weights)


def gradient_dissimilarity(sites: Sequence[SiteSummary]) -> Measure:
    """B^2 = sum_k p_k |g_k|^2 / |sum_k p_k g_k|^2 with p_k by images: 1 if all sites pull in the same direction."""
    images = sum(s.images for s in sites)
    mean = sum((s.images / images * s.gradient for s in sites), torch.zeros_like(sites[0].gradient))
    square = float(mean.square().sum())
    value = sum(s.images / images * s.gradient_square for s in sites) / square if square > 0 else None
    return Measure(
        "gradient_b2",
        value,
        "gradient dissimilarity B^2 (1: all sites pull the same way)",
        "one number per site, and the mean gradient, which every federated method sends",
    )


def sizes(sites: Sequence[SiteSummary]) -> list[Measure]:
    """How many sites there are, and how unequal they are."""
    images = {s.site: float(s.images) for s in sites}
    most, least = max(images.values()), min(images.values())
    reveals = "the number of training images of each site"
    return [
        Measure("sites", float(len(sites)), "sites that train", "nothing about their data"),
        Measure("images", sum(images.values()) / len(images), "training images per site", reveals, dict(images)),
        Measure("imbalance", most / least, "images of the largest site over those of the smallest", reveals),
    ]


def measure(sites: Sequence[SiteSummary]) -> list[Measure]:
    """All measures, from what the sites sent."""
    return [*sizes(sites), *label_skew(sites), *feature_shift(sites), gradient_dissimilarity(sites)]


def _pooled(several: Sequence[Moments]) -> Moments:
    whole = several[0]
    for more in several[1:]:
        whole = whole + more
    return whole


def _w2(a: Moments, b: Moments, scale: float) -> float:
    apart = (a.mean - b.mean).square() + (a.var.sqrt() - b.var.sqrt()).square()
    return float(apart.sum()) / max(scale, 1e-12)


def _mean(values: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    known = {k: v for k, v in values.items() if v is not None}
    whole = sum(weights[k] for k in known)
    return sum(weights[k] * v for k, v in known.items()) / whole if whole else None
