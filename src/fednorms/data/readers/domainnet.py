"""DomainNet: 345 classes as clip art, infographics, paintings, quick drawings, photographs and sketches.

Paper:
    Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019, https://arxiv.org/abs/1812.01754
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.problems import raise_problems
from fednorms.data.readers.divisions import shuffled
from fednorms.data.readers.fedbn_lists import fedbn_federation, fedbn_lists
from fednorms.data.readers.pictures import (
    FEDBN,
    FEDNN,
    MEMORY,
    Cache,
    Member,
    Pictures,
    absent,
    built,
    cross_device,
    joined,
    present,
    text_list,
)
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of
from fednorms.data.sizes import Size

TEN_CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
TEN_LISTS: Mapping[str, tuple[int, int]] = {
    "clipart": (2103, 526),
    "infograph": (2626, 657),
    "painting": (2472, 619),
    "quickdraw": (4000, 1000),
    "real": (4864, 1217),
    "sketch": (2213, 554),
}
FULL_LISTS: Mapping[str, tuple[int, int]] = {
    "clipart": (33525, 14604),
    "infograph": (36023, 15582),
    "painting": (50416, 21850),
    "quickdraw": (120750, 51750),
    "real": (120906, 52041),
    "sketch": (48212, 20916),
}
PROTOCOLS = {
    "fedwon": "FedBN and FedWon, ten classes: the first 105 of each training list, validation the last 105, 256 px",
    "greg": "GReg, ten classes: 630 training and 210 validation images per domain, 256 px",
    "greg-top100": "GReg cross-device: the 100 largest classes, 200 clients with 380 training images each, 256 px",
    "fednn": "FedNN: all 345 classes, six clients, the official lists, 224 px; pooled score",
}
_SHARES = {"fedwon": (0.05, 0.05), "greg": (0.3, 0.1)}
_FOLDERS = {domain: (domain,) for domain in TEN_LISTS}
_CLIENTS, _EACH, _TOP = 200, 380, 100


def domainnet(
    root: str | Path,
    protocol: str = "fedwon",
    size: Size | None = None,
    seed: int = 0,
    complete: bool = True,
    allow_pickle: bool = False,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read DomainNet in the three sizes that papers use: ten classes, the 100 largest, or all 345.

    GReg's shares are inferred from its Table 6. Our choices: GReg's hundred classes are those with the most training
    images over all domains; its 200 clients are divided over the domains in proportion to their training images; FedNN
    uses the official lists and ImageNet's mean and standard deviation.

    `root` has the domains with their class folders, and the lists next to them.
    """
    place = READER.find(root, protocol)
    if protocol in _SHARES:
        lists, problems, drawn = fedbn_lists(place, _FOLDERS, TEN_CLASSES, allow_pickle, seed)
        for domain, (train, test) in TEN_LISTS.items():
            have = {part: len(pictures) for part, pictures in lists[domain].items()}
            problems += compared(domain, have, {"train": train, "test": test})
        notes = deviations("domainnet", problems, complete) + drawn
        return fedbn_federation(
            "domainnet", root, place, lists, TEN_CLASSES, protocol, _SHARES[protocol], size or 256, seed, notes,
            cache, memory_limit,
        )  # fmt: skip
    return _official(root, place, protocol, size, seed, complete, cache, memory_limit)


def layout(root: Path) -> str | None:
    """Which layout of DomainNet a folder has, in words."""
    folders = [root / domain for domain in TEN_LISTS if (root / domain).is_dir()]
    if len(folders) < 3 or not any((root / domain).is_dir() for domain in ("quickdraw", "infograph", "clipart")):
        return None
    said = []
    if any(root.glob("*_train.pkl")) or any(root.glob("*_train.npz")):
        said.append("FedBN's lists of ten classes")
    if any(root.glob("*_train.txt")):
        said.append("the official lists")
    return f"class folders with {' and '.join(said)}" if said else "class folders without lists"


def _official(
    root: str | Path,
    place: Path,
    protocol: str,
    size: Size | None,
    seed: int,
    complete: bool,
    cache: Cache,
    memory_limit: int,
) -> Federation:
    lists: dict[str, dict[str, Pictures]] = {}
    problems, missing = [], []
    for domain in FULL_LISTS:
        for part in ("train", "test"):
            path = place / f"{domain}_{part}.txt"
            if path.is_file():
                lists.setdefault(domain, {})[part] = text_list(path, place)
            else:
                missing.append(f"the official list {path.name} is missing")
    raise_problems(f'Federation "domainnet" in "{place}"', missing)
    for domain, (train, test) in FULL_LISTS.items():
        have = {part: len(pictures) for part, pictures in lists[domain].items()}
        problems += compared(domain, have, {"train": train, "test": test})
        problems += absent({f"{domain}, {part}": pictures for part, pictures in lists[domain].items()})
        lists[domain] = {part: present(pictures) for part, pictures in lists[domain].items()}
    names = _class_names(lists)
    notes = deviations("domainnet", problems, complete)
    found, parts = {}, {}
    for domain, two in lists.items():
        found[domain], parts[domain] = joined(two)
    if protocol == "greg-top100":
        members, kept, found = _top(found, parts, seed)
        names = [names[label] for label in kept]
        norm, pixels, habits = Preprocessing(), size or 256, FEDBN
    else:
        members = [Member(domain, domain, parts[domain]) for domain in found]
        norm, pixels, habits = Preprocessing.imagenet(), size or 224, FEDNN
    source = source_of(root, protocol, seed, notes)
    return built("domainnet", place, found, members, names, pixels, norm, source, cache, memory_limit, protocol=habits)


def _class_names(lists: Mapping[str, Mapping[str, Pictures]]) -> list[str]:
    named: dict[int, str] = {}
    for parts in lists.values():
        for pictures in parts.values():
            for path, label in zip(pictures.paths, pictures.y.tolist(), strict=True):
                if named.setdefault(label, path.parent.name) != path.parent.name:
                    raise BadInput(
                        f'Federation "domainnet": label {label} means {named[label]} and {path.parent.name}.'
                    )
    if not named:
        raise BadInput('Federation "domainnet": none of the listed images is there.')
    return [named.get(label, f"class {label}") for label in range(max(named) + 1)]


def top_classes(counts: np.ndarray, most: int = _TOP) -> np.ndarray:
    """The labels with the most images (the smaller label first where equal), in ascending order.

    >>> top_classes(np.array([5, 9, 9, 1]), 2).tolist()
    [1, 2]
    """
    return np.sort(np.argsort(-counts, kind="stable")[:most])


def clients_per_domain(available: Mapping[str, int], clients: int = _CLIENTS) -> dict[str, int]:
    """Clients in proportion to images, rounded down but at least one each; the rest to the largest remainders.

    >>> clients_per_domain({"real": 60, "sketch": 39, "clipart": 1}, 10)
    {'real': 6, 'sketch': 3, 'clipart': 1}
    """
    if len(available) > clients:
        raise BadInput(f"{clients} clients cannot cover {len(available)} domains.")
    wish = np.array(list(available.values()), float)
    wish = wish / wish.sum() * clients
    count = np.maximum(np.floor(wish), 1).astype(int)
    while count.sum() != clients:
        step = 1 if count.sum() < clients else -1
        gap = (wish - count) * step
        gap[(count <= 1) & (step < 0)] = -np.inf
        count[int(np.argmax(gap))] += step
    return dict(zip(available, count.tolist(), strict=True))


def _top(
    found: Mapping[str, Pictures], parts: Mapping[str, Mapping[str, np.ndarray]], seed: int
) -> tuple[list[Member], list[int], dict[str, Pictures]]:
    labels = np.concatenate([found[domain].y[parts[domain]["train"]] for domain in found])
    kept = top_classes(np.bincount(labels))
    number = np.full(int(max(p.y.max() for p in found.values())) + 1, -1)
    number[kept] = np.arange(len(kept))
    renamed = {domain: Pictures(p.paths, number[p.y]) for domain, p in found.items()}
    inside = {domain: {part: at[renamed[domain].y[at] >= 0] for part, at in parts[domain].items()} for domain in found}
    share = clients_per_domain({domain: len(inside[domain]["train"]) for domain in found})
    members = []
    for domain, clients in share.items():
        pool = inside[domain]["train"]
        pool = pool[shuffled(len(pool), "top", seed, domain)]
        each = min(_EACH, len(pool) // clients)
        if each == 0:
            raise BadInput(
                f'Federation "domainnet": {domain} has {len(pool)} training images, too few for {clients} clients.'
            )
        members += cross_device(domain, clients, each, pool, inside[domain]["test"], seed)
    return members, kept.tolist(), renamed


READER = Reader(
    "domainnet",
    "DomainNet: ten, a hundred or 345 classes in six styles",
    domainnet,
    PROTOCOLS,
    layout,
    "ROOT/{clipart,infograph,painting,quickdraw,real,sketch}/{class}/* with {domain}_{train,test}.pkl (ten classes) "
    "or {domain}_{train,test}.txt (official)",
    ("DomainNet", "domainnet", "domain_net"),
    Published(
        "345 classes in six styles, from clip art to photographs. Counts are those of the official lists; FedBN's "
        "release has lists of ten classes.",
        {"authors": "http://ai.bu.edu/M3SDA/", "FedBN's release": "https://github.com/med-air/FedBN"},
        "non-commercial research only; the images belong to their owners",
        FULL_LISTS,
    ),
)
