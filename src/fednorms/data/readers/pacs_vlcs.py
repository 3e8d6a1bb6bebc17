"""PACS: photographs, paintings and drawings of seven classes. VLCS: five classes from four photo collections.

Papers:
    Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017, https://arxiv.org/abs/1710.03077 (PACS)
    Fang, Xu, Rockmore, Unbiased Metric Learning: On the Utilization of Multiple Datasets and Web Images for Softening
    Bias, ICCV 2013,
    https://openaccess.thecvf.com/content_iccv_2013/papers/Fang_Unbiased_Metric_Learning_2013_ICCV_paper.pdf (VLCS)
    Torralba, Efros, Unbiased Look at Dataset Bias, CVPR 2011, https://doi.org/10.1109/CVPR.2011.5995347 (VLCS)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.readers.divisions import greg, shuffled, tenth_per_class
from fednorms.data.readers.pictures import (
    FEDBN,
    FEDNN,
    MEMORY,
    PLAIN,
    Cache,
    Member,
    Pictures,
    absent,
    built,
    class_folders,
    count_classes,
    cross_device,
    folder_of,
    has_domains,
    images_in,
    joined,
    no_folder,
    present,
    require_domains,
    text_list,
)
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, deviations, source_of
from fednorms.data.sizes import Size

PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
PACS_COUNTS: Mapping[str, Sequence[int]] = {
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}
VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
VLCS_COUNTS: Mapping[str, Sequence[int]] = {
    "Caltech101": (237, 123, 118, 67, 870),
    "LabelMe": (80, 1209, 89, 43, 1235),
    "SUN09": (21, 933, 1036, 31, 1261),
    "VOC2007": (330, 699, 428, 420, 1499),
}
PACS_PROTOCOLS = {
    "fednn": "FedNN: floor(0.1 n) test images per domain and class (986 in all), 224 px; pooled score",
    "greg": "GReg: 584 training and 233 validation images per domain, 30 % for testing, 256 px",
    "greg-cross-device": "GReg: 25 clients per domain with 46 training images each, 256 px",
    "official": "the authors' kfold lists: train and validation; a held-out domain is tested on all its images, 224 px",
}
VLCS_PROTOCOLS = {
    "fednn": "FedNN: floor(0.1 n) test images per domain and class (1,064 in all), 224 px; pooled score",
    "greg": "GReg: 297 training and 297 validation images per domain, 30 % for testing, 256 px",
}
_PACS_FOLDERS = {
    "art_painting": ("art_painting", "art"),
    "cartoon": ("cartoon",),
    "photo": ("photo",),
    "sketch": ("sketch",),
}
_VLCS_FOLDERS = {
    "Caltech101": ("Caltech101", "CALTECH"),
    "LabelMe": ("LabelMe",),
    "SUN09": ("SUN09", "SUN"),
    "VOC2007": ("VOC2007", "PASCAL"),
}


def pacs(
    root: str | Path,
    protocol: str = "fednn",
    size: Size | None = None,
    seed: int = 0,
    complete: bool = True,
    imagenet_norm: bool | None = None,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read PACS: 9,991 images of seven classes as art paintings, cartoons, photographs and sketches.

    FedNN's test set is inferred from its published accuracies, which are all k/986. GReg's rule is inferred from its
    Table 6, which confuses the domains' names. FedNN does not state its normalization; we use ImageNet's. GReg, like
    FedBN, does not normalize.

    `root` has `art_painting/dog/...` (flat), or is the official `kfold` folder with its lists. `imagenet_norm` says
    whether to normalize with ImageNet's statistics, by default as the protocol does.
    """
    place = PACS.find(root, protocol)
    base = folder_of(place, ["kfold"]) or place
    found, problems = class_folders(base, _PACS_FOLDERS, PACS_CLASSES)
    require_domains("pacs", place, problems)
    for domain, pictures in found.items():
        problems += count_classes(domain, pictures, PACS_CLASSES, PACS_COUNTS[domain])
    if protocol == "official":
        found, parts, told = _official(place, base)
        problems += told
        members = [Member(domain, domain, parts[domain]) for domain in found]
    else:
        members = _divided("pacs", found, protocol, seed, (0.5, 0.2), (25, 46))
    notes = deviations("pacs", problems, complete)
    source = source_of(root, protocol, seed, notes)
    return _built("pacs", place, found, members, PACS_CLASSES, source, size, imagenet_norm, cache, memory_limit)


def pacs_layout(root: Path) -> str | None:
    """Which layout of PACS a folder has, in words."""
    if (inner := folder_of(root, ["kfold"])) and has_domains(inner, _PACS_FOLDERS, PACS_CLASSES):
        return "official (kfold)"
    return "flat" if has_domains(root, _PACS_FOLDERS, PACS_CLASSES) else None


def vlcs(
    root: str | Path,
    protocol: str = "fednn",
    size: Size | None = None,
    seed: int = 0,
    complete: bool = True,
    imagenet_norm: bool | None = None,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read VLCS: 10,729 photographs of five classes from Caltech101, LabelMe, SUN09 and VOC2007.

    FedNN's test set is inferred from its published accuracies, which are all k/1,064. GReg's rule is inferred from its
    Table 6; it gives LabelMe 797 test images where the paper has 796. The options are those of `pacs`.

    `root` has `Caltech101/bird/...` (flat), or `CALTECH/{train,crossval,test,full}/0/...`.
    """
    place = VLCS.find(root, protocol)
    if vlcs_layout(place) == "flat":
        found, problems = class_folders(place, _VLCS_FOLDERS, VLCS_CLASSES)
    else:
        found, problems = _numbered(place)
    require_domains("vlcs", place, problems)
    for domain, pictures in found.items():
        problems += count_classes(domain, pictures, VLCS_CLASSES, VLCS_COUNTS[domain])
    notes = deviations("vlcs", problems, complete)
    members = _divided("vlcs", found, protocol, seed, (0.3, 0.3), (0, 0))
    source = source_of(root, protocol, seed, notes)
    return _built("vlcs", place, found, members, VLCS_CLASSES, source, size, imagenet_norm, cache, memory_limit)


def vlcs_layout(root: Path) -> str | None:
    """Which layout of VLCS a folder has, in words."""
    if has_domains(root, _VLCS_FOLDERS, VLCS_CLASSES):
        return "flat"
    folders = [folder for names in _VLCS_FOLDERS.values() if (folder := folder_of(root, names))]
    numbered = [f for f in folders if any((f / part / "0").is_dir() for part in ("full", "train", "test", "crossval"))]
    return "split folders with numbered classes" if len(numbered) >= 2 else None


def _divided(
    name: str,
    found: Mapping[str, Pictures],
    protocol: str,
    seed: int,
    shares: tuple[float, float],
    device: tuple[int, int],
) -> list[Member]:
    if protocol == "fednn":
        return [Member(domain, domain, tenth_per_class(p.y, seed, f"{name} {domain}")) for domain, p in found.items()]
    labels = {domain: p.y for domain, p in found.items()}
    if protocol == "greg":
        return [Member(domain, domain, parts) for domain, parts in greg(labels, *shares, seed).items()]
    whole = greg(labels, 1.0, 0.0, seed)  # train: as many of every domain as the smallest has
    clients, each = device
    members = []
    for domain, parts in whole.items():
        pool = parts["train"]
        most = min(each, len(pool) // clients)
        if most == 0:
            raise BadInput(
                f'Federation "{name}": {domain} has {len(pool)} training images, too few for {clients} clients.'
            )
        pool = pool[shuffled(len(pool), "clients", seed, domain)]
        members += cross_device(domain, clients, most, pool, parts["test"], seed)
    return members


def _official(place: Path, base: Path) -> tuple[dict[str, Pictures], dict[str, dict[str, np.ndarray]], list[str]]:
    """Pictures and splits from the kfold lists (labels 1 to 7)."""
    found, parts, problems = {}, {}, []
    for domain in PACS_COUNTS:
        lists = {}
        for part, word in (("train", "train"), ("val", "crossval")):
            name = f"{domain}_{word}_kfold.txt"
            path = next((p for p in [place / name, base / name, *sorted(place.rglob(name))] if p.is_file()), None)
            if path is None:
                raise BadInput(f'Federation "pacs": no list {name} in "{place}", which protocol "official" needs.')
            lists[part] = text_list(path, base, first=1)
        problems += absent(lists)
        found[domain], parts[domain] = joined({part: present(pictures) for part, pictures in lists.items()})
    return found, parts, problems


def _numbered(place: Path) -> tuple[dict[str, Pictures], list[str]]:
    found, problems = {}, []
    for domain, names in _VLCS_FOLDERS.items():
        folder = folder_of(place, names)
        if folder is None:
            problems.append(no_folder(domain, names, place))
            continue
        inner = [folder / "full"] if (folder / "full").is_dir() else [folder / p for p in ("train", "crossval", "test")]
        paths: list[Path] = []
        labels: list[int] = []
        for part in inner:
            for label in range(len(VLCS_CLASSES)):
                images = images_in(part / str(label)) if (part / str(label)).is_dir() else []
                paths += images
                labels += [label] * len(images)
        found[domain] = Pictures(paths, np.asarray(labels, np.int64))
    return found, problems


def _built(
    name: str,
    place: Path,
    found: Mapping[str, Pictures],
    members: Sequence[Member],
    classes: Sequence[str],
    source: Mapping[str, Any],
    size: Size | None,
    imagenet_norm: bool | None,
    cache: Cache,
    memory_limit: int,
) -> Federation:
    """256 pixels, flips, rotations and no normalization for GReg, as FedBN; 224 pixels and ImageNet's for others."""
    protocols = {"fednn": FEDNN, "official": PLAIN}
    greg = source["protocol"].startswith("greg")
    normalized = not greg if imagenet_norm is None else imagenet_norm
    pixels = (256 if greg else 224) if size is None else size
    norm = Preprocessing.imagenet() if normalized else Preprocessing()
    source, habits = {**source, "imagenet_norm": normalized}, protocols.get(source["protocol"], FEDBN)
    return built(name, place, found, members, classes, pixels, norm, source, cache, memory_limit, protocol=habits)


PACS = Reader(
    "pacs",
    "PACS: seven classes as art, cartoon, photo and sketch",
    pacs,
    PACS_PROTOCOLS,
    pacs_layout,
    "ROOT/{art_painting,...}/{dog,...}/*.jpg or ROOT/kfold",
    ("PACS", "pacs", "pacs_data"),
    Published(
        "Seven classes as art paintings, cartoons, photographs and sketches.",
        {"authors": "https://domaingeneralization.github.io/"},
        "none found",
        {domain: sum(counts) for domain, counts in PACS_COUNTS.items()},
    ),
)
VLCS = Reader(
    "vlcs",
    "VLCS: five classes from four photo collections",
    vlcs,
    VLCS_PROTOCOLS,
    vlcs_layout,
    "ROOT/{Caltech101,...}/{bird,...}/*.jpg or ROOT/{CALTECH,...}/full/{0..4}/*.jpg",
    ("VLCS", "vlcs"),
    Published(
        "Five classes that four collections of photographs share: Caltech-101, LabelMe, SUN09 and PASCAL VOC 2007.",
        {"folders as in JigenDG": "https://github.com/fmcarlucci/JigenDG#vlcs"},
        "none found; each collection has its own terms",
        {domain: sum(counts) for domain, counts in VLCS_COUNTS.items()},
    ),
)
