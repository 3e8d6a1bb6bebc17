"""Federations from folders of images, root/site/class/image, decoded once into a cache on disk."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.folders.cache import MEMORY_LIMIT, counted_only, load, read_images
from fednorms.data.folders.decode import MODES, Decoding, Prepared, first_size, read_image
from fednorms.data.folders.scan import (
    EXTENSIONS,
    SITE_LAYOUT,
    Group,
    ImageFile,
    check_groups,
    class_names,
    divide,
    groups_of,
    other_files,
    scan,
    scan_site,
    similar_names,
)
from fednorms.data.problems import raise_problems

__all__ = [
    "EXTENSIONS",
    "Prepared",
    "counted_only",
    "from_folders",
    "read_image",
    "read_images",
    "site_from_folder",
]


def from_folders(
    root: str | Path,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    val: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    group: Group | None = None,
    cache: str | Path | bool | None = None,
    memory_limit: int = MEMORY_LIMIT,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    name: str | None = None,
) -> Federation:
    r"""Make a federation of `root/site/class/image.png` (or jpg, bmp, tif, webp, gif: the first frame).

    The classes are the sorted union over the sites; a site may lack some. A site may bring its own split,
    `root/site/{train,val,test}/class/image`, which is used as it is. Hidden files are ignored. EXIF rotation is
    applied; 16-bit images are scaled to 8 bits. A run on it records the folder and these options, so the command line
    can continue and test it; with `classes`, `preprocessing`, `name`, a `size` of two numbers or a function as `group`,
    only Python can.

    Args:
        root: the folder of the sites.
        size: resize to this many pixels (bilinear; one number for a square, or height and width; the aspect ratio is
            not kept). Without it all images must have the same shape.
        channels: 3 (RGB), 1 (gray) or 4 (RGBA).
        val: fraction of each site's images for validation, stratified.
        test: fraction for testing.
        seed: decides, together with the site's name, which images those are.
        group: keeps the images of one patient in one split: a function of the path, or a regular expression whose
            first group (or whole match) in the file name is the patient.
        cache: the folder for decoded images; by default the user's cache folder, False for none.
        memory_limit: in bytes; above it, images stay in the cache and are read batch by batch.
        classes: names and order of the classes, by default those of the folders.
        preprocessing: by default pixels are scaled to [-1, 1].
        name: the federation's name, by default the folder's.

    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     for site, color in (("berlin", "red"), ("oslo", "blue")):
    ...         for label in ("cat", "dog"):
    ...             folder = Path(root, site, label)
    ...             folder.mkdir(parents=True)
    ...             for i in range(5):
    ...                 Image.new("RGB", (8, 8), color).save(folder / f"patient{i}-scan.png")
    ...     from_folders(root, val=0, group=r"(patient\d+)", cache=False, name="pets")
    Federation 'pets': 2 sites, 2 classes, images 3x8x8
    site    domain  train  val  test  classes
    berlin  berlin      8    -     2  2/2
    oslo    oslo        8    -     2  2/2
    """
    if not isinstance(root, str | Path):
        raise BadInput(f"from_folders: root must be a folder, got {root!r}.")
    root = Path(root).expanduser()
    _check_options(size, channels, val, test, memory_limit)
    files = scan(root)
    names = class_names(root, files, classes)
    sites = _sites(root, files, names, size, channels, val, test, seed, group, cache, memory_limit)
    source: dict[str, Any] = {
        "spec": f"folder:{root.resolve()}",
        "size": size if size is None or isinstance(size, int) else list(size),
        "channels": channels,
        "val": val,
        "test": test,
        "seed": seed,
        "group": group if isinstance(group, str | None) else getattr(group, "__qualname__", repr(group)),
    }
    if notes := [*other_files(root), *similar_names(names)]:
        source["notes"] = notes
    whole = name is None and classes is None and preprocessing is None  # a recipe cannot say these
    made = Federation(
        name or root.resolve().name, sites, names, preprocessing or Preprocessing.centered(channels), source
    )
    if whole and isinstance(size, int | None) and isinstance(group, str | None):
        given = {"size": size, "channels": channels, "val": val, "test": test, "seed": seed, "group": group}
        made.remember(source["spec"], {key: value for key, value in given.items() if value != _DEFAULTS[key]})
    return made


_DEFAULTS = {key: p.default for key, p in signature(from_folders).parameters.items()}


def site_from_folder(
    folder: str | Path,
    classes: Sequence[str],
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    val: float = 0.0,
    test: float = 0.0,
    seed: int = 0,
    group: Group | None = None,
    cache: str | Path | bool | None = None,
    memory_limit: int = MEMORY_LIMIT,
    prepared: Prepared | None = None,
) -> Site:
    """Make one new site of `folder/class/image.png`, with the classes of an existing federation.

    The options are those of `from_folders`, and how images are prepared before they are resized. Without fractions all
    images are in the train split.

    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "clinic", "dog").mkdir(parents=True)
    ...     Image.new("RGB", (8, 8)).save(Path(root, "clinic", "dog", "rex.png"))
    ...     site_from_folder(Path(root, "clinic"), classes=["cat", "dog"], cache=False)
    Site('clinic', domain='clinic', train=1)
    """
    folder = Path(folder).expanduser()
    _check_options(size, channels, val, test, memory_limit)
    if not folder.is_dir():
        raise BadInput(f'"{folder}" is not a folder; {SITE_LAYOUT}.')
    files, problems = scan_site(folder.resolve(), SITE_LAYOUT)
    raise_problems(f'Folder "{folder}"', problems)
    names = class_names(folder, files, classes)
    root = folder.resolve()
    return _sites(root, files, names, size, channels, val, test, seed, group, cache, memory_limit, prepared)[0]


def _sites(
    root: Path,
    files: Sequence[ImageFile],
    classes: Sequence[str],
    size: int | tuple[int, int] | None,
    channels: int,
    val: float,
    test: float,
    seed: int,
    group: Group | None,
    cache: str | Path | bool | None,
    memory_limit: int,
    prepared: Prepared | None = None,
) -> list[Site]:
    groups = groups_of(files, group)
    hw = (size, size) if isinstance(size, int) else size
    wanted = Decoding(root, files, (channels, *(hw or first_size(files))), hw is not None, prepared)
    number = {label: i for i, label in enumerate(classes)}
    y = torch.tensor([number[file.label] for file in files], dtype=torch.int64)
    everything = Split(load(wanted, cache, memory_limit), y)
    members: dict[str, list[int]] = {}
    for i, file in enumerate(files):
        members.setdefault(file.site, []).append(i)
    sites = []
    for site, inside in members.items():
        at = np.array(inside)
        whose = None if groups is None else [groups[i] for i in inside]
        parts = divide([files[i] for i in inside], y[at], whose, val, test, seed)
        splits = {part: everything.subset(at[chosen]) for part, chosen in parts.items()}
        sites.append(Site(site, site, splits.get("train"), splits.get("val"), splits.get("test")))
    if not any(file.part for file in files):
        check_groups(sites, groups, test)
    return sites


def _check_options(
    size: int | tuple[int, int] | None, channels: int, val: float, test: float, memory_limit: int
) -> None:
    problems = []
    sides = () if size is None else (size,) if isinstance(size, int) else tuple(size)
    if size is not None and (len(sides) not in (1, 2) or not all(isinstance(s, int) and s > 0 for s in sides)):
        problems.append(f"size must be a positive number of pixels or (height, width), got {size!r}")
    if channels not in MODES:
        problems.append(f"channels must be 1, 3 or 4, got {channels!r}")
    if min(val, test) < 0 or val + test >= 1:
        problems.append(f"val and test must be fractions that leave images to train on, got {val} and {test}")
    if memory_limit < 0:
        problems.append(f"memory_limit must be a number of bytes, got {memory_limit}")
    raise_problems("from_folders", problems)
