"""Image files with labels: find them in class folders or lists, check them, and read them as a federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.folders import EXTENSIONS, Prepared, read_images
from fednorms.data.folders.broken import Broken, broken_files, is_skipping, left_out_note
from fednorms.data.pickles import load_pickle
from fednorms.data.problems import raise_problems
from fednorms.data.protocol import Protocol
from fednorms.data.readers.divisions import Parts, shuffled
from fednorms.data.readers.reader import compared
from fednorms.data.sizes import Size, sides, size_problem

Cache = str | Path | bool | None
PLAIN = Protocol()  # no augmentation, cross-entropy, accuracy
FEDNN = Protocol(
    "feddyn"
)  # crops and flips; FedNN does not state their ranges, so FedDC's are used, on which it builds
FEDBN = Protocol("flip_rotate")  # of FedBN, FedWon and GReg on photographs
NO_SPELLINGS: Mapping[str, str] = {}  # other names of classes in copies of a data set
MEMORY = 2 * 2**30  # bytes of images that are read into memory; more stay in the cache on disk


@dataclass(frozen=True)
class Pictures:
    """Image files and their labels, in order; `groups` are patients or lesions, where the data set names them."""

    paths: Sequence[Path]
    y: np.ndarray
    groups: Sequence[str] = field(default=())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: np.ndarray) -> Pictures:
        return Pictures([self.paths[i] for i in at], self.y[at], [self.groups[i] for i in at] if self.groups else ())


@dataclass(frozen=True)
class Member:
    """A planned site: its domain, and the positions of its splits in the domain's images."""

    name: str
    domain: str
    parts: Parts


def plain(name: str) -> str:
    """A folder's name without case, spaces and punctuation, which differ between copies of a data set.

    >>> plain("Real World") == plain("Real_World")
    True
    """
    return "".join(c for c in name.lower() if c.isalnum())


def folder_of(place: Path, names: Sequence[str]) -> Path | None:
    """The folder inside `place` with one of these names in any spelling."""
    wanted = {plain(name) for name in names}
    if not place.is_dir():
        return None
    return next((p for p in sorted(place.iterdir()) if p.is_dir() and plain(p.name) in wanted), None)


def numbers_of(classes: Sequence[str], spellings: Mapping[str, str] = NO_SPELLINGS) -> dict[str, int]:
    """The label of every class name without case and punctuation, and of names that other copies use.

    >>> numbers_of(["mug", "laptop_computer"], {"laptop": "laptop_computer"})
    {'mug': 0, 'laptopcomputer': 1, 'laptop': 1}
    """
    number = {plain(name): i for i, name in enumerate(classes)}
    return number | {plain(other): number[plain(name)] for other, name in spellings.items()}


def has_domains(
    place: Path,
    domains: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    spellings: Mapping[str, str] = NO_SPELLINGS,
) -> bool:
    """Whether at least two of the domains are there, each with at least half of the class folders."""
    found = [folder for names in domains.values() if (folder := folder_of(place, names))]
    known = numbers_of(classes, spellings)
    fits = [sum(plain(p.name) in known for p in _below(folder) if p.is_dir()) * 2 >= len(classes) for folder in found]
    return sum(fits) >= min(2, len(domains))


def _below(folder: Path) -> list[Path]:
    inner = folder_of(folder, ["images"])
    return sorted((inner or folder).iterdir())


def no_folder(domain: str, names: Sequence[str], place: Path) -> str:
    """The problem of a domain without a folder; `require_domains` recognizes it."""
    return f"{domain}: no folder {' or '.join(names)} in {place}"


def require_domains(name: str, place: Path, problems: Sequence[str]) -> None:
    """Raise the problems of `class_folders` if a whole domain is missing; the others are for `deviations`."""
    raise_problems(f'Federation "{name}" in "{place}"', [p for p in problems if "no folder" in p])


def class_folders(
    place: Path,
    domains: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    spellings: Mapping[str, str] = NO_SPELLINGS,
) -> tuple[dict[str, Pictures], list[str]]:
    """The pictures of each domain, domain/class/image or domain/images/class/image, and what is wrong."""
    problems: list[str] = []
    found: dict[str, Pictures] = {}
    number = numbers_of(classes, spellings)
    for domain, names in domains.items():
        folder = folder_of(place, names)
        if folder is None:
            problems.append(no_folder(domain, names, place))
            continue
        paths: list[Path] = []
        labels: list[int] = []
        others: list[str] = []
        for inner in _below(folder):
            if not inner.is_dir() or inner.name.startswith("."):
                continue
            label = number.get(plain(inner.name))
            if label is None:
                others.append(inner.name)
                problems.append(f'{domain}: folder "{inner.name}" is not one of the {len(classes)} classes')
                continue
            images = images_in(inner)
            paths += images
            labels += [label] * len(images)
        missing = [name for i, name in enumerate(classes) if i not in set(labels)]
        if missing:
            also = {name: "".join(f" or {o}" for o, n in spellings.items() if n == name) for name in missing}
            problems.append(
                f"{domain}: no images of {_listed([name + also[name] for name in missing])}"
                + (f"; folders of other names: {_listed(others)}" if others else "")
            )
        found[domain] = Pictures(paths, np.asarray(labels, np.int64))
    return found, problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def images_in(folder: Path) -> list[Path]:
    """The image files of a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in EXTENSIONS and not p.name.startswith("."))


def count_classes(domain: str, pictures: Pictures, classes: Sequence[str], expected: Sequence[int]) -> list[str]:
    """How the pictures per class differ from the published numbers."""
    counts = Counter(pictures.y.tolist())
    have = {name: counts.get(i, 0) for i, name in enumerate(classes)}
    return compared(domain, have, dict(zip(classes, expected, strict=True)))


def count_domains(found: Mapping[str, Pictures], expected: Mapping[str, int]) -> list[str]:
    """How the pictures per domain differ from the published numbers."""
    return compared("counts", {domain: len(p) for domain, p in found.items()}, expected)


def pickled_list(
    path: Path,
    place: Path,
    classes: Sequence[str],
    allow_pickle: bool,
    spellings: Mapping[str, str] = NO_SPELLINGS,
) -> Pictures:
    """A list of FedBN's releases: relative paths and class names, as a pickle or converted to .npz."""
    if path.with_suffix(".npz").is_file():
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            pair: Any = (arrays["x"], arrays["y"])
    else:
        pair = load_pickle(path, allow_pickle)
    if not isinstance(pair, tuple | list) or len(pair) != 2 or len(pair[0]) != len(pair[1]):
        raise BadInput(f"{path.name} must hold as many paths as class names.")
    number = numbers_of(classes, spellings)
    names = [str(name) for name in pair[1]]
    if unknown := sorted({name for name in names if plain(name) not in number}):
        raise BadInput(f"{path.name} names classes that are not among the {len(classes)}: {', '.join(unknown[:5])}.")
    paths = [below(place, str(entry)) for entry in pair[0]]
    return Pictures(paths, np.asarray([number[plain(name)] for name in names], np.int64))


def text_list(path: Path, place: Path, first: int = 0) -> Pictures:
    """A list with lines "path label", labels counted from `first`."""
    paths, labels = [], []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry, _, label = line.strip().rpartition(" ")
        if not entry or not label.isdigit() or int(label) < first:
            raise BadInput(f'{path.name}, line {i}: expected "path label", got "{line[:80]}".')
        paths.append(below(place, entry))
        labels.append(int(label) - first)
    return Pictures(paths, np.asarray(labels, np.int64))


def below(place: Path, entry: str) -> Path:
    """A listed path inside `place`, with or without the data set's own folder in front.

    >>> below(Path("/no/PACS"), "PACS/photo/a.png") == Path("/no/PACS/photo/a.png")
    True
    """
    relative = Path(entry.replace("\\", "/"))
    if relative.is_absolute() or ".." in relative.parts:
        raise BadInput(f'a list names "{entry}", which is not inside the data set.')
    if relative.parts and plain(relative.parts[0]) == plain(place.name):
        return place / Path(*relative.parts[1:])
    return place / relative


def absent(found: Mapping[str, Pictures]) -> list[str]:
    """The problems of listed files that do not exist."""
    told = []
    for domain, pictures in found.items():
        gone = [path for path in pictures.paths if not path.is_file()]
        if gone:
            told.append(f'{domain}: {len(gone):,} of {len(pictures):,} listed images missing, the first is "{gone[0]}"')
    return told


def present(pictures: Pictures) -> Pictures:
    """Leave out the listed files that do not exist."""
    return pictures[np.flatnonzero([path.is_file() for path in pictures.paths])]


def joined(lists: Mapping[str, Pictures]) -> tuple[Pictures, Parts]:
    """Join several lists into one, and return the positions of each.

    >>> one, two = (Pictures([Path(name)], np.array([label])) for name, label in (("a", 1), ("b", 0)))
    >>> both, parts = joined({"train": one, "test": two})
    >>> both.y.tolist(), {part: at.tolist() for part, at in parts.items()}
    ([1, 0], {'train': [0], 'test': [1]})
    """
    ends = np.cumsum([0, *map(len, lists.values())])
    parts = {part: np.arange(a, b) for part, a, b in zip(lists, ends, ends[1:], strict=False)}
    return Pictures([p for x in lists.values() for p in x.paths], np.concatenate([x.y for x in lists.values()])), parts


def built(
    name: str,
    place: Path,
    pictures: Mapping[str, Pictures],
    members: Sequence[Member],
    classes: Sequence[str],
    size: Size,
    preprocessing: Preprocessing,
    source: Mapping[str, Any],
    cache: Cache = None,
    memory_limit: int = MEMORY,
    prepared: Prepared | None = None,
    protocol: Protocol = PLAIN,
) -> Federation:
    """Build the federation of these members; only images of some split are decoded, each once."""
    raise_problems(f'Federation "{name}"', size_problem(size))
    height, width = sides(size)
    used = {
        domain: np.unique(np.concatenate([at for m in members if m.domain == domain for at in m.parts.values()]))
        for domain in dict.fromkeys(m.domain for m in members)
    }
    used, broken = _readable(place, pictures, used, cache) if is_skipping() else (used, [])
    paths = [pictures[domain].paths[i] for domain, at in used.items() for i in at]
    images = read_images(place, paths, (3, height, width), cache, memory_limit, prepared)
    if tuple(images.shape[2:]) != (height, width):
        preprocessing = replace(preprocessing, crop=None)  # only counted: images are one pixel, which has no center
    y = torch.from_numpy(np.concatenate([pictures[domain].y[at] for domain, at in used.items()]))
    everything = Split(images, y, _groups(pictures, used))
    begin = dict(zip(used, np.cumsum([0, *map(len, used.values())]).tolist(), strict=False))
    sites = []
    for member in members:
        splits = {
            part: everything.subset(begin[member.domain] + np.searchsorted(used[member.domain], kept))
            for part, at in member.parts.items()
            if len(kept := at[np.isin(at, used[member.domain])])
        }
        whole = (splits.get("train"), splits.get("val"), splits.get("test"))
        sites.append(Site(member.name, member.domain, *whole))
    told: dict[str, Any] = {"prepared": prepared.name} if prepared else {}
    if broken:
        told |= {"left_out": [str(one) for one in broken]}
        source = {**source, "notes": [*source.get("notes", []), *left_out_note(broken)]}
    told |= {"size": size if isinstance(size, int) else [height, width]}
    return Federation(name, sites, classes, preprocessing, {"spec": name, **told, **source}, protocol)


def _groups(pictures: Mapping[str, Pictures], used: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The group of every image that is used; None unless all are known."""
    if not used or not all(pictures[domain].groups for domain in used):
        return None
    return np.array([pictures[domain].groups[i] for domain, at in used.items() for i in at])


def _readable(
    place: Path, pictures: Mapping[str, Pictures], used: Mapping[str, np.ndarray], cache: Cache
) -> tuple[dict[str, np.ndarray], list[Broken]]:
    """The positions of pictures that can be read, and the files of the others."""
    kept, broken = {}, list[Broken]()
    for domain, at in used.items():
        bad = broken_files(place, [pictures[domain].paths[i] for i in at], cache)
        kept[domain] = np.delete(at, list(bad))
        broken += bad.values()
    return kept, broken


def cross_device(domain: str, clients: int, each: int, pool: np.ndarray, test: np.ndarray, seed: int) -> list[Member]:
    """`clients` sites of one domain with `each` training images, and an even share of the domain's test images.

    Test images are shuffled before they are shared: readers list images by class.

    >>> made = cross_device("photo", 2, 3, np.arange(8), np.arange(8, 11), seed=0)
    >>> [(m.name, m.parts["train"].tolist(), len(m.parts["test"])) for m in made]
    [('photo-0', [0, 1, 2], 2), ('photo-1', [3, 4, 5], 1)]
    """
    digits = len(str(clients - 1))
    shares = np.array_split(test[shuffled(len(test), "client tests", seed, domain)], clients)
    tests = [np.sort(share) for share in shares]
    return [
        Member(
            f"{domain}-{i:0{digits}d}", domain, {"train": np.sort(pool[i * each : (i + 1) * each]), "test": tests[i]}
        )
        for i in range(clients)
    ]
