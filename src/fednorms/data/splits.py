"""Split a labeled set into named parts: stratified, by group if wanted, and decided only by names and a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.noise import hashed_uniform, seed_of

Labels = Tensor | np.ndarray | Sequence[int]


def split(
    y: Labels,
    fractions: Mapping[str, float],
    seed: int = 0,
    name: str = "",
    groups: Sequence[object] | np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Divide positions 0 to N-1 into parts of about the given fractions of every class.

    The rest goes to a part "train", listed first. The parts are disjoint, complete and sorted. Every class is split to
    within a few samples: rounding in one class is compensated in the next, and train gets the first sample of a rare
    class. With `groups` (a patient per image) a group stays in one part: the largest groups are placed first, each
    where it brings the counts closest to the wanted ones.

    The result depends only on the labels, `seed` and `name` (the site's), not on the state of a random generator.

    >>> parts = split([0] * 10 + [1] * 10, {"val": 0.1, "test": 0.2}, seed=0, name="clinic")
    >>> {part: len(at) for part, at in parts.items()}
    {'train': 14, 'val': 2, 'test': 4}
    >>> patients = np.arange(20) // 4
    >>> by_patient = split([0] * 10 + [1] * 10, {"test": 0.4}, groups=patients)
    >>> set(patients[by_patient["train"]]) & set(patients[by_patient["test"]])
    set()
    """
    labels = np.asarray(y)
    shares = _shares(fractions)
    if groups is None:
        chosen = _by_class(labels, shares, seed, name)
    else:
        if len(groups) != len(labels):
            raise BadInput(f"split: {len(labels)} labels but {len(groups)} groups; give one group per sample.")
        chosen = _by_group(labels, [str(group) for group in groups], shares, seed, name)
    return {part: np.flatnonzero(chosen == i) for i, part in enumerate(shares)}


def _shares(fractions: Mapping[str, float]) -> dict[str, float]:
    if any(not 0 <= f <= 1 for f in fractions.values()) or sum(fractions.values()) > 1 + 1e-9:
        raise BadInput(f"split: fractions must be 0 to 1 and sum to at most 1, got {dict(fractions)}.")
    rest = 1 - sum(fractions.values())
    if rest <= 1e-9:
        return dict(fractions)
    if "train" in fractions:
        raise BadInput(f"split: fractions that include train must sum to 1, got {dict(fractions)}.")
    return {"train": rest, **fractions}


def _shuffled(count: int, *names: object) -> np.ndarray:
    # Counter-based numbers of this library: no other library promises the same permutation in its next version.
    word = seed_of("split", *names)
    key = torch.tensor([word >> 32, word & 0xFFFFFFFF])
    return hashed_uniform(key, 0, (count,), torch.float64).argsort(stable=True).numpy()


def _by_class(labels: np.ndarray, shares: Mapping[str, float], seed: int, name: str) -> np.ndarray:
    chosen = np.empty(len(labels), dtype=np.int64)
    fraction = np.array(list(shares.values()))
    fraction = fraction / fraction.sum()
    carry = np.zeros(len(fraction))
    for label in np.unique(labels):
        at = np.flatnonzero(labels == label)
        wish = len(at) * fraction + carry
        count = _rounded(wish, len(at))
        if "train" in shares and count[0] == 0:
            # Train is first: a class without training samples could not be learned.
            count[np.argmax(count)] -= 1
            count[0] = 1
        carry = np.clip(wish - count, -1, 1) * (fraction > 0)
        carry -= carry.sum() * fraction
        order = at[_shuffled(len(at), seed, name, int(label))]
        chosen[order] = np.repeat(np.arange(len(count)), count)
    return chosen


def _rounded(wish: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers of sum `total` near `wish`: largest remainders first, none negative."""
    wish = np.maximum(wish, 0)
    wish = wish * (total / wish.sum())
    count = np.floor(wish + 1e-9).astype(np.int64)
    order = np.argsort(-(wish - count), kind="stable")
    count[order[: total - count.sum()]] += 1
    return count


def _by_group(
    labels: np.ndarray, groups: Sequence[str], shares: Mapping[str, float], seed: int, name: str
) -> np.ndarray:
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    classes, label = np.unique(labels, return_inverse=True)
    table = np.zeros((len(names), len(classes)))
    np.add.at(table, (member, label), 1)
    per_class = np.maximum(table.sum(0), 1)
    want = np.outer(list(shares.values()), table.sum(0))
    have = np.zeros_like(want)
    home = np.zeros(len(names), dtype=np.int64)
    shuffled = _shuffled(len(names), seed, name, "groups")
    for group in shuffled[np.argsort(-table[shuffled].sum(1), kind="stable")]:
        # Growth of the squared distance to the wanted counts, all classes weighted equally, for each part.
        growth = ((2 * (have - want) + table[group]) * table[group] / per_class).sum(1)
        growth[[share == 0 for share in shares.values()]] = np.inf
        home[group] = int(np.argmin(growth))
        have[home[group]] += table[group]
    _fill_empty(home, table.sum(1), shares)
    return home[member]


def _fill_empty(home: np.ndarray, sizes: np.ndarray, shares: Mapping[str, float]) -> None:
    """Give a part that got no group the smallest group of the part that has the most groups."""
    for part, share in enumerate(shares.values()):
        held = np.bincount(home, minlength=len(shares))
        if share > 0 and held[part] == 0 and held.max(initial=0) > 1:
            candidates = np.flatnonzero(home == held.argmax())
            home[candidates[np.argmin(sizes[candidates])]] = part
