"""Open labelled images for a run's model: a folder, a federation or a pack, with classes matched by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fednorms.core.errors import BadInput
from fednorms.data import Federation, Site, Split, site_from_folder
from fednorms.data.facts import Facts
from fednorms.data.folders.broken import Broken
from fednorms.data.folders.preparations import preparation
from fednorms.data.folders.spelling import BETWEEN, key_of, split_named
from fednorms.data.registry import federation as read_federation
from fednorms.data.sizes import Size
from fednorms.runs.option_names import flag, option


def labelled_sites(
    data: str | Path | Federation,
    facts: Facts,
    split: str = "test",
    size: Size | None = None,
    group: str | None = None,
    broken: list[Broken] | None = None,
) -> list[Site]:
    """The sites of labelled data, each with its images in `split`.

    A folder holds class/image or site/class/image, and all of its images are used unless it has folders train, val and
    test. Classes may be in another order or some may be missing. `size` is that of a named federation, and `group` a
    regular expression that finds the patient in a file name. Files of a folder that cannot be read are an error, or are
    left out and added to the list `broken` if there is one.
    """
    if (folder := folder_of(data)) is not None:
        sites = _in_folder(folder, facts, group, broken)
        found = [_only(site, split, everything="train" if set(site.splits) == {"train"} else split) for site in sites]
    else:
        if group or broken is not None:
            given = option("group") if group else flag("skip_broken")
            raise BadInput(f"{_name(data)}: {given} is for folders of images.")
        packed = isinstance(data, Federation) or str(data).startswith("pack:") or str(data).endswith(".fnpack")
        opened = read_federation(data, size=None if packed else size)
        sites = [_renumbered(site, opened, facts) for site in opened.sites]
        found = [_only(site, split, everything=split) for site in sites]
    kept = [site for site in found if site is not None]
    if not kept:
        there = sorted({part for site in sites for part in site.splits})
        raise BadInput(
            f"{_name(data)} has no {split} images. It has {' and '.join(there)} images: choose them with "
            f"{option('split')}."
        )
    return kept


def folder_of(data: str | Path | Federation) -> Path | None:
    """The folder that data name; None if they are a federation, its name or a pack."""
    if isinstance(data, Federation):
        return None
    folder = Path(str(data).removeprefix("folder:")).expanduser()
    return folder if folder.is_dir() else None


def _name(data: str | Path | Federation) -> str:
    return f'Federation "{data.name}"' if isinstance(data, Federation) else str(data)


def _in_folder(folder: Path, facts: Facts, group: str | None, broken: list[Broken] | None) -> list[Site]:
    """The sites of class/image (one site) or site/class/image."""
    place = folder
    while len(inner := _folders(place)) == 1 and _folders(inner[0]) and not _is_site(place, facts):
        if _is_site(inner[0], facts):
            break
        place = inner[0]  # unpacked archives often have a folder around everything
    names, one_site = {p.name for p in inner}, _is_site(place, facts)
    if not one_site and not any(q.is_dir() for p in inner for q in p.iterdir()):
        known = ", ".join(facts.classes[:8]) + (", ..." if facts.classes[8:] else "")
        raise BadInput(
            f'Folder "{folder}" has no labelled images: expected class/image or site/class/image with the classes of '
            f"the run ({known}), found {', '.join(sorted(names)[:8]) or 'no folders'}."
        )
    channels, height, width = facts.stored_shape
    sites = []
    for site in [place] if one_site else inner:
        left_out: list[Broken] = []
        sites.append(
            site_from_folder(
                site,
                facts.classes,
                (height, width),
                channels,
                group=group,
                prepared=preparation(facts.prepared),
                skip_broken=broken is not None,
                left_out=left_out,
            )
        )
        if broken is not None:
            broken += left_out if one_site else [replace(b, name=f"{site.name}/{b.name}") for b in left_out]
    return sites


def _is_site(folder: Path, facts: Facts) -> bool:
    """Whether a folder holds classes of the run, in any spelling, or splits; `images/` may be in between."""
    names = [p.name for p in _folders(folder)]
    if len(names) == 1 and key_of(names[0]) in BETWEEN:
        names = [p.name for p in _folders(folder / names[0])]
    known = {key_of(name) for name in facts.classes}
    return any(key_of(name) in known for name in names) or (bool(names) and all(map(split_named, names)))


def _folders(folder: Path) -> list[Path]:
    hidden = (".", "__MACOSX", "@eaDir")
    return [p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith(hidden)]


def _only(site: Site, split: str, *, everything: str) -> Site | None:
    """The site with one split, which holds its images of `everything`."""
    images = site.splits.get(everything)
    if images is None:
        return None
    empty = Site(site.name, site.domain, attributes=site.attributes)
    return replace(empty, **{split: images})  # type: ignore[arg-type]


def _renumbered(site: Site, opened: Federation, facts: Facts) -> Site:
    """The site with the class numbers of the run."""
    if unknown := [c for c in opened.classes if c not in facts.classes]:
        raise BadInput(
            f'Federation "{opened.name}" has classes that the run does not know: {", ".join(unknown[:8])}. The run has '
            f"{', '.join(facts.classes[:8])}{', ...' if facts.classes[8:] else ''}."
        )
    if opened.stored_shape != facts.stored_shape:
        raise BadInput(
            f'Federation "{opened.name}" has images of {opened.stored_shape}, but the run was trained on '
            f"{facts.stored_shape} (channels, height, width). Open it with the same {option('size')}."
        )
    number = torch.tensor([facts.classes.index(c) for c in opened.classes])
    splits: dict[str, Split] = {part: replace(s, y=number[s.y]) for part, s in site.splits.items()}
    return replace(site, **splits)  # type: ignore[arg-type]
