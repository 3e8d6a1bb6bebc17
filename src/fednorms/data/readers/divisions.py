"""How papers divide a data set: rules that see only labels and counts, so they can be tested without images.

Papers:
    Kang et al., FedNN: Federated learning on concept drift data using weight and adaptive group normalizations,
    Pattern Recognition 149 (2024), 110230, https://doi.org/10.1016/j.patcog.2023.110230
    Improving Batch Normalization in Federated Learning with Non-IID Features (GReg), submission to ICLR 2026,
    https://openreview.net/forum?id=225qfh0CoD
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.noise import hashed_uniform, seed_of
from fednorms.data.splits import split

Parts = dict[str, np.ndarray]


def shuffled(count: int, *names: object) -> np.ndarray:
    """Shuffle the positions 0 to count-1 in an order that depends only on the names.

    >>> sorted(shuffled(4, "mnist", 0).tolist())
    [0, 1, 2, 3]
    """
    word = seed_of("reader", *names)
    key = torch.tensor([word >> 32, word & 0xFFFFFFFF])
    return hashed_uniform(key, 0, (count,), torch.float64).argsort(stable=True).numpy()


def even(count: int, clients: int, *names: object) -> list[np.ndarray]:
    """Cut shuffled positions into parts whose sizes differ by at most one, each in ascending order.

    >>> sorted({len(part) for part in even(7438, 20, "usps")})
    [371, 372]
    """
    if count < clients:
        raise BadInput(f"{count} images cannot be divided over {clients} clients.")
    return [np.sort(part) for part in np.array_split(shuffled(count, *names), clients)]


def tenth_per_class(y: np.ndarray, seed: int, name: str) -> Parts:
    """FedNN's rule for PACS, VLCS and Office-Home: floor(0.1 n) test images of every class, the rest for training.

    >>> {part: len(at) for part, at in tenth_per_class(np.repeat([0, 1], [19, 31]), 0, "photo").items()}
    {'train': 46, 'test': 4}
    """
    test = []
    for label in np.unique(y):
        at = np.flatnonzero(y == label)
        test.append(at[shuffled(len(at), "tenth", seed, name, int(label))][: len(at) // 10])
    held = np.sort(np.concatenate(test)) if test else np.empty(0, np.int64)
    return {"train": np.setdiff1d(np.arange(len(y)), held), "test": held}


def greg(
    labels: Mapping[str, np.ndarray], train: float, val: float, seed: int, subsample: float = 1.0
) -> dict[str, Parts]:
    """GReg's rule, inferred from its Table 6: test = ceil(0.3 n), train and val are shares of the smallest remainder.

    n_h = ceil(subsample N_h); pool_h = n_h - ceil(0.3 n_h); m = min pool_h; train int(train m), val int(val m),
    drawn from the pool. Test images are stratified by class.

    >>> sizes = greg({"a": np.zeros(100, int), "b": np.zeros(40, int)}, 0.5, 0.2, 0)
    >>> {site: [len(at) for at in parts.values()] for site, parts in sizes.items()}
    {'a': [14, 5, 30], 'b': [14, 5, 12]}
    """
    kept, tested, pools = {}, {}, {}
    for site, y in labels.items():
        n = math.ceil(subsample * len(y) - 1e-9)
        order = shuffled(len(y), "greg", seed, site)[:n]
        kept[site] = np.sort(order)
        tested[site] = stratified(y[kept[site]], math.ceil(0.3 * n - 1e-9), seed, site)
        rest = np.setdiff1d(np.arange(n), tested[site])
        pools[site] = rest[shuffled(len(rest), "greg pool", seed, site)]
    m = min(map(len, pools.values()))
    first, second = int(train * m), int(val * m)
    return {
        site: {
            "train": np.sort(kept[site][pool[:first]]),
            "val": np.sort(kept[site][pool[first : first + second]]),
            "test": kept[site][tested[site]],
        }
        for site, pool in pools.items()
    }


def stratified(y: np.ndarray, count: int, seed: int, name: str) -> np.ndarray:
    """Exactly `count` positions, every class in proportion (largest remainders), in ascending order.

    >>> y = np.repeat([0, 1], [30, 10])
    >>> np.bincount(y[stratified(y, 8, 0, "a")]).tolist()
    [6, 2]
    """
    if not 0 <= count <= len(y):
        raise BadInput(f"{name}: {count} images wanted of {len(y)}.")
    labels, sizes = np.unique(y, return_counts=True)
    wish = sizes * (count / max(len(y), 1))
    take = np.floor(wish + 1e-9).astype(np.int64)
    take[np.argsort(-(wish - take), kind="stable")[: count - take.sum()]] += 1
    chosen = [
        np.flatnonzero(y == label)[shuffled(int(size), "stratified", seed, name, int(label))][:k]
        for label, size, k in zip(labels, sizes, take, strict=True)
    ]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def sklearn_eighty_twenty(y: np.ndarray) -> Parts:
    """FedBN's division: scikit-learn's stratified shuffle split in its order, 20 % for testing, random state 0.

    >>> {part: len(at) for part, at in sklearn_eighty_twenty(np.arange(50) % 5).items()}
    {'train': 40, 'test': 10}
    """
    from sklearn.model_selection import StratifiedShuffleSplit  # here, because it takes a second to import

    train, test = next(StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0).split(y, y))
    return {"train": train, "test": test}


def fractions(y: np.ndarray, val: float, test: float, seed: int, name: str) -> Parts:
    """A stratified split, where no paper states one.

    >>> {part: len(at) for part, at in fractions(np.arange(20) % 2, 0.1, 0.2, 0, "a").items()}
    {'train': 14, 'val': 2, 'test': 4}
    """
    return {part: at for part, at in split(y, {"val": val, "test": test}, seed, name).items() if len(at)}
