"""How much sites differ in labels, and, for images of the same class, in brightness and color."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fednorms.data.check.images import Seen

_FEWEST = 5  # images of a class that a site and the others need to be compared


def label_shift(counts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Total variation distance of each site's labels from those of all sites, 1/2 sum_c |p_k(c) - p(c)|.

    >>> label_shift({"a": [2, 0], "b": [0, 2]})
    {'a': 0.5, 'b': 0.5}
    """
    table = {site: np.array(row, float) for site, row in counts.items() if sum(row)}
    pooled = np.sum(list(table.values()), 0)
    return {site: float(np.abs(row / row.sum() - pooled / pooled.sum()).sum() / 2) for site, row in table.items()}


def feature_shift(images: Sequence[Seen]) -> dict[str, float]:
    """Distance of each site's images from those of the other sites, class by class, in standard deviations of an image.

    An image is described by the mean and the standard deviation of its three channels. For class c with mean m and
    standard deviation s (within sites) of such a value, the site's part is (m_site - m_others)^2 / s^2 - 1/n_site -
    1/n_others: what chance would give is subtracted. The distance is the root of the mean over classes (weighted by the
    site's images) and values. Labels do not matter: a site with other shares of classes, but the same images, has
    distance 0. Sites that share no class with others are left out.
    """
    usable = [i for i in images if i.look.mean]
    if not usable:
        return {}
    values = np.array([(*i.look.mean, *i.look.std) for i in usable])
    site = np.array([i.site for i in usable])
    label = np.array([i.label for i in usable])
    found = {}
    for name in dict.fromkeys(site.tolist()):
        parts, weights = [], []
        for c in np.unique(label[site == name]):
            mine, others = values[(label == c) & (site == name)], values[(label == c) & (site != name)]
            if min(len(mine), len(others)) < _FEWEST:
                continue
            spread = _within(values[label == c], site[label == c])
            chance = 1 / len(mine) + 1 / len(others)
            gap = (mine.mean(0) - others.mean(0)) ** 2 / np.maximum(spread, 1e-8)
            parts.append(float(np.mean(gap - chance)))
            weights.append(len(mine))
        if parts:
            found[name] = math.sqrt(max(0.0, float(np.average(parts, weights=weights))))
    return found


def _within(values: np.ndarray, site: np.ndarray) -> np.ndarray:
    """The variance of values around the means of their sites."""
    names, member = np.unique(site, return_inverse=True)
    means = np.stack([values[member == k].mean(0) for k in range(len(names))])
    return np.asarray(((values - means[member]) ** 2).sum(0) / max(1, len(values) - len(names)))


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was seen in n trials.

    >>> low, high = wilson(0.5, 32)
    >>> round(low, 3), round(high, 3)
    (0.336, 0.664)
    """
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half
