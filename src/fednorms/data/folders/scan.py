"""Find the image files of a folder of sites: which file belongs to which site, split and class."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.options import few
from fednorms.data.federation import Site
from fednorms.data.problems import raise_problems
from fednorms.data.splits import split

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
Group = str | Callable[[Path], Hashable]
_READ = ", ".join(EXTENSIONS)
LAYOUT = "expected root/site/class/image.png"
SITE_LAYOUT = "expected folder/class/image.png, the folder of one site"
_NOT_DATA = ("__MACOSX", "@eaDir")  # folders that archives and storage devices add


@dataclass(frozen=True)
class ImageFile:
    """An image file, and the site, split and class that its folders name."""

    path: Path
    site: str
    part: str  # the split, or "" where the folders do not name one
    label: str
    of_data_set: bool = False  # of a published data set, which is read as its papers do


def scan(root: Path) -> list[ImageFile]:
    """All image files, sorted by site, split, class and name."""
    if not root.is_dir():
        raise BadInput(f'"{root}" is not a folder; {LAYOUT}.')
    sites = _folders(root)
    if not sites:
        raise BadInput(f'Folder "{root}" has no site folders; {LAYOUT}.')
    if all(not _folders(site) and _images_in(site) for site in sites):
        raise BadInput(
            f'Folder "{root}" is not a federation but looks like one site: its folders '
            f"({few([site.name for site in sites])}) hold images, not class folders; {LAYOUT}. If they are classes, "
            f'put them into the folder of their site, or use the folder above: "{root.parent}".'
        )
    files: list[ImageFile] = []
    stray = _images_in(root)
    problems = [f"it has {len(stray)} images next to its site folders; {LAYOUT}"] if stray else []
    for site in sites:
        inside, wrong = scan_site(site)
        files += inside
        problems += wrong
    raise_problems(f'Folder "{root}"', problems)
    return files


def scan_site(site: Path, layout: str = LAYOUT) -> tuple[list[ImageFile], list[str]]:
    """The image files of one site and what is wrong with its folders."""
    files: list[ImageFile] = []
    problems: list[str] = []
    inner = _folders(site)
    divided = {p.name for p in inner} <= {"train", "val", "test"} and any(_folders(p) for p in inner)
    if divided and (stray := _images_in(site)):
        problems.append(
            f'"{site}" has {len(stray)} images next to its folders {", ".join(sorted(p.name for p in inner))}'
        )
    for part, folder in [(p.name, p) for p in inner] if divided else [("", site)]:
        labels = _folders(folder)
        if not labels:
            loose = len(_images_in(folder))
            said = f" but {loose} images (if it is a class, put it into the folder of its site)" if loose else ""
            problems.append(f'"{folder}" has no class folders{said}; {layout}')
        elif stray := _images_in(folder):
            problems.append(f'"{folder}" has {len(stray)} images next to its class folders; {layout}')
        for label in labels:
            images = _images_in(label)
            if inside := [p for p in _folders(label) if any(q.suffix.lower() in EXTENSIONS for q in p.rglob("*"))]:
                also = "next to" if images else "instead of"
                problems.append(f'"{label}" has folders ("{inside[0].name}") {also} images; {layout}')
            files += [ImageFile(path, site.name, part, label.name) for path in images]
    if not files and not problems:
        problems.append(f'site "{site.name}" has no images ({_READ})')
    return files, problems


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name not in _NOT_DATA)
    except OSError as error:
        raise BadInput(f'Folder "{folder}" cannot be read: {error.strerror or error}.') from None


def _folders(folder: Path) -> list[Path]:
    found = [p for p in _visible(folder) if p.is_dir()]
    for path in found:
        if not _is_text(path.name):  # it would be the name of a site or class
            shown = path.name.encode("ascii", "backslashreplace").decode()
            raise BadInput(f'Folder "{folder}": the name of its folder "{shown}" is not UTF-8. Rename it.')
    return found


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)  # how Python marks bytes that are not UTF-8


def _images_in(folder: Path) -> list[Path]:
    return [p for p in _visible(folder) if p.suffix.lower() in EXTENSIONS and p.is_file()]


def class_names(root: Path, files: Sequence[ImageFile], classes: Sequence[str] | None) -> list[str]:
    """The names of the classes: those given, or the class folders in sorted order."""
    found = sorted({file.label for file in files})
    if classes is None:
        return found
    if unknown := [label for label in found if label not in classes]:
        listed = ", ".join(unknown)
        raise BadInput(f'Folder "{root}": class folders {listed} are not among {", ".join(classes)}. Rename them.')
    return list(classes)


def groups_of(files: Sequence[ImageFile], group: Group | None) -> list[str] | None:
    """The group (a patient) of every file, or None without groups."""
    if group is None:
        return None
    if not isinstance(group, str):
        return [str(group(file.path)) for file in files]
    try:
        pattern = re.compile(group)
    except re.error as problem:
        raise BadInput(f'group "{group}" is not a regular expression: {problem}.') from None
    matches = [pattern.search(file.path.name) for file in files]
    missed = [str(file.path) for file, match in zip(files, matches, strict=True) if match is None]
    if missed:
        raise BadInput(
            f'group "{group}" matches nothing in {len(missed)} of {len(files)} file names; the first is "{missed[0]}".'
        )
    return [(m.group(1) or "") if pattern.groups else m.group(0) for m in matches if m is not None]


def divide(
    files: Sequence[ImageFile],
    y: torch.Tensor,
    groups: Sequence[str] | None,
    val: float,
    test: float,
    seed: int,
) -> dict[str, np.ndarray]:
    """The positions of each split of one site: as its folders say, or drawn."""
    if not files[0].part:
        return _tested_first(y, groups, val, test, seed, files[0].site)
    if groups is not None:
        home: dict[str, str] = {}
        for file, member in zip(files, groups, strict=True):
            if home.setdefault(member, file.part) != file.part:
                raise BadInput(
                    f'Site "{file.site}": group "{member}" is in both {home[member]} and {file.part} '
                    f'("{file.path}"). Move its images into one of them.'
                )
    parts = np.array([file.part for file in files])
    return {part: np.flatnonzero(parts == part) for part in ("train", "val", "test")}


def _tested_first(
    y: torch.Tensor, groups: Sequence[str] | None, val: float, test: float, seed: int, site: str
) -> dict[str, np.ndarray]:
    """Draw the test images first, then the validation images: another `val` leaves the test images unchanged."""
    first = split(y, {"test": test}, seed, site, groups)
    rest = first["train"]
    of_rest = None if groups is None else [groups[i] for i in rest]
    second = split(y[rest], {"val": val / (1 - test)}, seed, f"{site} val", of_rest)
    return {"train": rest[second["train"]], "val": rest[second["val"]], "test": first["test"]}


def check_groups(sites: Sequence[Site], groups: Sequence[str] | None, test: float) -> None:
    """Refuse groups so large that no image is left for testing, which would otherwise show only after training."""
    if groups is not None and test and not any("test" in site.splits for site in sites):
        raise BadInput(
            f"group makes {len(set(groups))} groups, too few at every site to keep one for testing. Check that the "
            "pattern tells patients apart."
        )


def other_files(root: Path) -> list[str]:
    """A note about files in class folders that are not images, in case the user takes them for images."""
    kinds = Counter(
        p.suffix.lower() or "no suffix"
        for site in _folders(root)
        for pattern in ("*/*", "*/*/*")
        for p in site.glob(pattern)
        if p.is_file() and p.suffix.lower() not in EXTENSIONS and not p.name.startswith(".")
    )
    said = ", ".join(f"{n} of {kind}" for kind, n in sorted(kinds.items())[:5])
    return [f"files that are not read: {said} (read are {_READ})"] if kinds else []


def similar_names(classes: Sequence[str]) -> list[str]:
    """Notes about classes with nearly the same name, which may be one class."""
    seen: dict[str, str] = {}
    notes = []
    for name in classes:
        other = seen.setdefault(unicodedata.normalize("NFKC", name).strip().casefold(), name)
        if other != name:
            how = "case, blanks or encoding"
            notes.append(f'classes "{other}" and "{name}" differ only in {how}, and are counted as two')
    return notes
