"""The lists of training and test images that FedBN published.

Paper:
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
    https://arxiv.org/abs/2102.07623
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.problems import raise_problems
from fednorms.data.readers.divisions import fractions, shuffled, sklearn_eighty_twenty
from fednorms.data.readers.pictures import (
    FEDBN,
    NO_SPELLINGS,
    Cache,
    Member,
    Pictures,
    absent,
    built,
    class_folders,
    joined,
    pickled_list,
)
from fednorms.data.readers.reader import source_of
from fednorms.data.sizes import Size


def fedbn_lists(
    place: Path,
    folders: Mapping[str, tuple[str, ...]],
    classes: tuple[str, ...],
    allow_pickle: bool,
    seed: int,
    spellings: Mapping[str, str] = NO_SPELLINGS,
) -> tuple[dict[str, dict[str, Pictures]], list[str], list[str]]:
    """Training and test images per domain from FedBN's lists; without lists they are drawn, and a note says so."""
    lists: dict[str, dict[str, Pictures]] = {}
    names = {(d, part): place / f"{d}_{part}.pkl" for d in folders for part in ("train", "test")}
    there = [path for path in names.values() if path.is_file() or path.with_suffix(".npz").is_file()]
    if there:
        problems = []
        for (domain, part), path in names.items():
            try:
                pictures = pickled_list(path, place, classes, allow_pickle, spellings)
            except BadInput as problem:
                problems.append(f"{domain}, {part}: {problem}")
                continue
            problems += absent({f"{domain}, {part}": pictures})
            lists.setdefault(domain, {})[part] = pictures
        raise_problems(f'The lists in "{place}"', problems)
        return lists, [], []
    found, problems = class_folders(place, folders, classes, spellings)
    problems = [p for p in problems if "is not one of the" not in p]  # the full data set has more classes
    raise_problems(f'The images in "{place}"', [p for p in problems if "no folder" in p or "no images" in p])
    for domain, pictures in found.items():
        parts = sklearn_eighty_twenty(pictures.y) if seed == 0 else _eighty_twenty(pictures.y, seed, domain)
        lists[domain] = {part: pictures[at] for part, at in parts.items()}
    return lists, problems, ["FedBN's lists were not there: the 80/20 split was drawn, and its order is another"]


def _eighty_twenty(y: np.ndarray, seed: int, domain: str) -> dict[str, np.ndarray]:
    parts = fractions(y, 0.0, 0.2, seed, domain)
    return {part: at[shuffled(len(at), "order", seed, domain, part)] for part, at in parts.items()}


def fedbn_federation(
    name: str,
    root: str | Path,
    place: Path,
    lists: Mapping[str, Mapping[str, Pictures]],
    classes: tuple[str, ...],
    protocol: str,
    shares: tuple[float, float] | None,
    size: Size,
    seed: int,
    notes: list[str],
    cache: Cache,
    memory_limit: int,
) -> Federation:
    """Training from the front of each list and validation from its end, in shares of the shortest list."""
    m = min(len(parts["train"]) for parts in lists.values())
    members, found = [], {}
    for domain, parts in lists.items():
        found[domain], at = joined({"train": parts["train"], "test": parts["test"]})
        if shares is not None:
            n, first, last = len(at["train"]), int(shares[0] * m), int(shares[1] * m)
            at = {"train": at["train"][:first], "val": at["train"][n - last :], "test": at["test"]}
        members.append(Member(domain, domain, at))
    source, plain = source_of(root, protocol, seed, notes), Preprocessing()
    return built(name, place, found, members, classes, size, plain, source, cache, memory_limit, protocol=FEDBN)
