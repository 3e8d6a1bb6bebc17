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
from fednorms.data.duplicates import without_copies
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.folders.broken import Broken, left_out_note, without_broken
from fednorms.data.folders.cache import MEMORY_LIMIT, counted_only, load, read_images
from fednorms.data.folders.decode import MODES, Decoding, Prepared, first_size, read_image
from fednorms.data.folders.divide import Copies, Division, Group, groups_of
from fednorms.data.folders.look import looks
from fednorms.data.folders.scan import (
    EXTENSIONS,
    SITE_LAYOUT,
    ImageFile,
    class_names,
    nested,
    other_files,
    respelled,
    scan,
    scan_site,
    similar_names,
)
from fednorms.data.problems import raise_problems
from fednorms.data.sizes import Size, sides, size_problem

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
    size: Size | None = None,
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
    group_across: bool = False,
    copies: Copies = "keep",
    skip_broken: bool = False,
) -> Federation:
    r"""Make a federation of `root/site/class/image.png` (or jpg, bmp, tif, webp, gif: the first frame).

    The classes are the sorted union over the sites; a site may lack some. A site may bring its own split,
    `root/site/{train,val,test}/class/image`, which is used as it is. `root/{train,test}/site/class/image`, a folder
    `images/` in between, and other spellings of a class at other sites are read as well. Hidden files are ignored. EXIF
    rotation is applied; 16-bit images are scaled to 8 bits. A run on it records the folder and these options, so
    the command line can continue and test it; with `classes`, `preprocessing`, `name` or a function as `group`, only
    Python can.

    Args:
        root: the folder of the sites.
        size: resize to this many pixels (bilinear; one number for a square, or height and width, also as "72x96"; the
            aspect ratio is not kept). Without it all images must have the same shape.
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
        group_across: groups have the same names at all sites, and stay in one split across sites, too.
        copies: equal images: "keep" them; "drop" all but one, where a test image stays; or keep them "together" in one
            split.
        skip_broken: leave out files that cannot be read; `source["left_out"]` lists them.

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
    division = Division(val, test, seed, group, group_across, copies)
    _check_options(size, channels, division, memory_limit)
    found = scan(root)
    files, spelled = respelled(found, classes)
    names = class_names(root, files, classes)
    files, broken = without_broken(root, files, cache) if skip_broken else (files, [])
    sites = _sites(root, files, names, size, channels, division, cache, memory_limit)
    source: dict[str, Any] = {
        "spec": f"folder:{root.resolve()}",
        "size": None if size is None else size if isinstance(size, int) else list(sides(size)),
        "channels": channels,
        "val": val,
        "test": test,
        "seed": seed,
        "group": group if isinstance(group, str | None) else getattr(group, "__qualname__", repr(group)),
    }
    if group_across:
        source["group_across"] = True
    if broken:
        source["left_out"] = [str(one) for one in broken]
    if notes := [*left_out_note(broken), *nested(root, found), *other_files(found), *spelled, *similar_names(names)]:
        source["notes"] = notes
    whole = name is None and classes is None and preprocessing is None  # a recipe cannot say these
    made = Federation(
        name or root.resolve().name, sites, names, preprocessing or Preprocessing.centered(channels), source
    )
    if copies == "drop":
        made = without_copies(made, cache)
    if whole and isinstance(group, str | None):
        given = {"size": size, "channels": channels, "val": val, "test": test, "seed": seed, "group": group}
        given |= {"group_across": group_across, "copies": copies, "skip_broken": skip_broken}
        made.remember(source["spec"], {key: value for key, value in given.items() if value != _DEFAULTS[key]})
    return made


_DEFAULTS = {key: p.default for key, p in signature(from_folders).parameters.items()}


def site_from_folder(
    folder: str | Path,
    classes: Sequence[str],
    size: Size | None = None,
    channels: int = 3,
    val: float = 0.0,
    test: float = 0.0,
    seed: int = 0,
    group: Group | None = None,
    cache: str | Path | bool | None = None,
    memory_limit: int = MEMORY_LIMIT,
    prepared: Prepared | None = None,
    copies: Copies = "keep",
    skip_broken: bool = False,
    left_out: list[Broken] | None = None,
) -> Site:
    """Make one new site of `folder/class/image.png`, with the classes of an existing federation.

    The options are those of `from_folders`, and how images are prepared before they are resized. Without fractions all
    images are in the train split. `copies="together"` keeps equal images in one split. Files that `skip_broken` leaves
    out are added to the list `left_out`.

    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "clinic", "dog").mkdir(parents=True)
    ...     Image.new("RGB", (8, 8)).save(Path(root, "clinic", "dog", "rex.png"))
    ...     site_from_folder(Path(root, "clinic"), classes=["cat", "dog"], cache=False)
    Site('clinic', domain='clinic', train=1)
    """
    folder = Path(folder).expanduser()
    division = Division(val, test, seed, group, copies=copies)
    _check_options(size, channels, division, memory_limit)
    if not folder.is_dir():
        raise BadInput(f'"{folder}" is not a folder; {SITE_LAYOUT}.')
    root = folder.resolve()
    found, problems = scan_site(root, SITE_LAYOUT)
    raise_problems(f'Folder "{folder}"', problems)
    files, _ = respelled(found, classes)
    names = class_names(folder, files, classes)
    if skip_broken:
        files, broken = without_broken(root, files, cache)
        if left_out is not None:
            left_out += broken
    return _sites(root, files, names, size, channels, division, cache, memory_limit, prepared)[0]


def _sites(
    root: Path,
    files: Sequence[ImageFile],
    classes: Sequence[str],
    size: Size | None,
    channels: int,
    division: Division,
    cache: str | Path | bool | None,
    memory_limit: int,
    prepared: Prepared | None = None,
) -> list[Site]:
    number = {label: i for i, label in enumerate(classes)}
    y = torch.tensor([number[file.label] for file in files], dtype=torch.int64)
    together = division.copies == "together"
    content = (
        [look.pixels or str(i) for i, look in enumerate(looks(root, [f.path for f in files], cache))]
        if together
        else ()
    )
    parts = division.parts(files, y.numpy(), content)
    hw = None if size is None else sides(size)
    wanted = Decoding(root, files, (channels, *(hw or first_size(files))), hw is not None, prepared)
    names = np.array([str(file.path.relative_to(root)) for file in files])
    groups = groups_of(files, division.group)
    everything = Split(load(wanted, cache, memory_limit), y, None if groups is None else np.array(groups), names)
    sites = []
    for site, mine in parts.items():
        splits = {part: everything.subset(at) for part, at in mine.items()}
        sites.append(Site(site, site, splits.get("train"), splits.get("val"), splits.get("test")))
    return sites


def _check_options(size: Size | None, channels: int, division: Division, memory_limit: int) -> None:
    problems = [] if size is None else size_problem(size)
    if channels not in MODES:
        problems.append(f"channels must be 1, 3 or 4, got {channels!r}")
    problems += division.problems()
    if memory_limit < 0:
        problems.append(f"memory_limit must be a number of bytes, got {memory_limit}")
    raise_problems("from_folders", problems)
