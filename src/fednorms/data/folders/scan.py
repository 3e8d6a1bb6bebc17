"""Find the image files of a folder of sites: which file belongs to which site, split and class."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.core.options import few
from fednorms.data.folders.spelling import BETWEEN, as_known, key_of, one_spelling, split_named
from fednorms.data.problems import raise_problems

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
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
    """All image files, sorted by site, split, class and name.

    Layouts as people download them are read as well: the sites in one folder inside `root`, `images/` in between, and
    the split above the sites or classes.
    """
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
    place, (files, problems) = root, _scan_root(root)
    first = problems
    while problems and (inner := _only_folder(place)):
        place, (files, problems) = inner, _scan_root(inner)
    raise_problems(f'Folder "{root}"', first if problems else [])
    return files


def _scan_root(root: Path) -> tuple[list[ImageFile], list[str]]:
    """The image files of a folder of sites, and what is wrong with it."""
    inside = _folders(root)
    if not inside:
        return [], [f'"{root}" has no site folders; {LAYOUT}']
    named = [split_named(p.name) for p in inside]
    if len(inside) > 1 and all(named) and "train" in named:
        return _scan_splits(root, inside)
    files: list[ImageFile] = []
    stray = _images_in(root)
    problems = [f"it has {len(stray)} images next to its site folders; {LAYOUT}"] if stray else []
    for site in inside:
        found, wrong = scan_site(site)
        files += found
        problems += wrong
    return files, problems


def _scan_splits(root: Path, splits: Sequence[Path]) -> tuple[list[ImageFile], list[str]]:
    """The image files of {train,test}/site/class, or of {train,test}/class, which is one site."""
    files: list[ImageFile] = []
    problems: list[str] = []
    with_sites = any(_folders(_unwrapped(p)) for split in splits for p in _folders(_unwrapped(split)))
    for split in splits:
        part = split_named(split.name)
        for site in _folders(_unwrapped(split)) if with_sites else [split]:
            found, wrong = scan_site(site)
            if any(file.part for file in found):
                wrong.append(f'"{site}" has splits inside the split "{split.name}"; {LAYOUT}')
            files += [replace(file, site=site.name if with_sites else root.resolve().name, part=part) for file in found]
            problems += wrong
    same = one_spelling((file.part, file.site) for file in files)
    files = [replace(file, site=same.get(file.site, file.site)) for file in files]
    return sorted(files, key=lambda file: (file.site, file.part, file.label, file.path.name)), problems


def scan_site(site: Path, layout: str = LAYOUT) -> tuple[list[ImageFile], list[str]]:
    """The image files of one site and what is wrong with its folders."""
    files: list[ImageFile] = []
    problems: list[str] = []
    inner = _folders(_unwrapped(site))
    divided = all(split_named(p.name) for p in inner) and any(_folders(p) for p in inner)
    if divided and (stray := _images_in(site)):
        problems.append(
            f'"{site}" has {len(stray)} images next to its folders {", ".join(sorted(p.name for p in inner))}'
        )
    for part, folder in [(split_named(p.name), _unwrapped(p)) for p in inner] if divided else [("", _unwrapped(site))]:
        labels = _folders(folder)
        if not labels:
            loose = len(_images_in(folder))
            said = f" but {loose} images (if it is a class, put it into the folder of its site)" if loose else ""
            problems.append(f'"{folder}" has no class folders{said}; {layout}')
        elif stray := _images_in(folder):
            problems.append(f'"{folder}" has {len(stray)} images next to its class folders; {layout}')
        for label in labels:
            images = _images_in(label)
            inside = [p for p in _folders(label) if any(q.suffix.lower() in EXTENSIONS for q in p.rglob("*"))]
            if len(inside) == 1 and key_of(inside[0].name) in BETWEEN and not images and not _folders(inside[0]):
                images, inside = _images_in(inside[0]), []
            if inside:
                also = "next to" if images else "instead of"
                problems.append(f'"{label}" has folders ("{inside[0].name}") {also} images; {layout}')
            files += [ImageFile(path, site.name, part, label.name) for path in images]
    if not files and not problems:
        problems.append(f'site "{site.name}" has no images ({_READ})')
    return files, problems


def _only_folder(folder: Path) -> Path | None:
    """The only folder in a folder without images, as unpacked archives have it."""
    inside = _folders(folder)
    return inside[0] if len(inside) == 1 and not _images_in(folder) else None


def _unwrapped(folder: Path) -> Path:
    """A folder, or the folder images/ that is all it has if that has folders in turn."""
    inner = _only_folder(folder)
    return inner if inner and key_of(inner.name) in BETWEEN and _folders(inner) else folder


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


def respelled(files: Sequence[ImageFile], classes: Sequence[str] | None) -> tuple[list[ImageFile], list[str]]:
    """Give classes that sites spell differently one name (a known one, where `classes` are given), and say which."""
    labels = [file.label for file in files]
    same = one_spelling(((f.site, f.part), f.label) for f in files) if classes is None else as_known(labels, classes)
    how = "they differ only in case, separators or encoding"
    notes = [f'class folders "{name}" are read as "{same[name]}" ({how})' for name in same]
    if not same:
        return list(files), []
    respelt = [replace(file, label=same.get(file.label, file.label)) for file in files]
    return sorted(respelt, key=lambda file: (file.site, file.part, file.label, file.path.name)), notes


def class_names(root: Path, files: Sequence[ImageFile], classes: Sequence[str] | None) -> list[str]:
    """The names of the classes: those given, or the class folders in sorted order."""
    found = sorted({file.label for file in files})
    if classes is None:
        return found
    if unknown := [label for label in found if label not in classes]:
        listed = ", ".join(unknown)
        raise BadInput(f'Folder "{root}": class folders {listed} are not among {", ".join(classes)}. Rename them.')
    return list(classes)


def nested(root: Path, files: Sequence[ImageFile]) -> list[str]:
    """A note if the sites were found in a folder inside `root`: it may have been meant as a site."""
    place, sites = root, sorted({file.site for file in files})
    while (inner := _only_folder(place)) and inner.name not in sites and key_of(inner.name) not in BETWEEN:
        place = inner
    if place == root:
        return []
    shown = ", ".join(sites[:4]) + (" ..." if len(sites) > 4 else "")
    return [f'the sites are the folders inside "{place.relative_to(root).as_posix()}": {shown}']


def other_files(files: Sequence[ImageFile]) -> list[str]:
    """A note about files in class folders that are not images, in case the user takes them for images."""
    kinds = Counter(
        p.suffix.lower() or "no suffix"
        for folder in dict.fromkeys(file.path.parent for file in files)
        for p in _visible(folder)
        if p.suffix.lower() not in EXTENSIONS and p.is_file()
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
