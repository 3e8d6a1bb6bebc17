"""Federations from folders of images, root/site/class/image, decoded once into a cache on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split, raise_problems
from fednorms.data.mapped import MappedImages
from fednorms.data.splits import split

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
Group = str | Callable[[Path], Hashable]

_LAYOUT = "expected root/site/class/image.png"
_OF_SITE = "expected folder/class/image.png, the folder of one site"
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_NOT_DATA = ("__MACOSX", "@eaDir")  # what archives and storage devices put beside files
_NAMED = 10  # unreadable files named in one message
_FORMAT = 2  # of the cache: raise it when decoding changes, so that old files are not taken for new ones


_counting: ContextVar[bool] = ContextVar("fednorms_counting", default=False)


@contextmanager
def counted_only() -> Iterator[None]:
    """Within it, no image file is opened: each counts as one black pixel. For looking at what a large folder has."""
    token = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(token)


@dataclass(frozen=True)
class _File:
    path: Path
    site: str
    part: str  # "" where the folders do not say
    label: str
    of_data_set: bool = False  # of a published one, which is read as its papers do


def from_folders(
    root: str | Path,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    val: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    group: Group | None = None,
    cache: str | Path | bool | None = None,
    memory_limit: int = 2 * 2**30,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    name: str | None = None,
) -> Federation:
    r"""A federation from `root/site/class/image.png` (or jpg, bmp, tif, webp, gif: its first frame).

    The classes are the sorted union over the sites, and a site may miss some. A site may bring its own
    division, `root/site/{train,val,test}/class/image`, taken as it is. Hidden files are ignored.

    Args:
        root: the folder of the sites.
        size: resize to this many pixels (bilinear; one number for a square, or height and width; each side is
            scaled on its own). Without it all images must have one shape.
        channels: 3 (RGB), 1 (grey) or 4 (RGBA).
        val: fraction of each site's images kept for validation, stratified.
        test: fraction kept for testing.
        seed: decides, with the site's name, which images those are.
        group: the patient of an image, none of whom is in two splits: a function of the path, or a regular
            expression whose first group (or whole match) in the file name is the patient.
        cache: the folder for decoded images, by default in the user's cache folder; False for none.
        memory_limit: in bytes; a larger federation stays in the cache and is read batch by batch.
        classes: their names and order, if not those of the folders found.
        preprocessing: by default pixels go to [-1, 1].
        name: of the federation; by default the folder's.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     for site, colour in (("berlin", "red"), ("oslo", "blue")):
    ...         for label in ("cat", "dog"):
    ...             folder = Path(root, site, label)
    ...             folder.mkdir(parents=True)
    ...             for i in range(5):
    ...                 Image.new("RGB", (8, 8), colour).save(folder / f"patient{i}-scan.png")
    ...     from_folders(root, val=0, group=r"(patient\d+)", cache=False, name="pets")
    Federation 'pets': 2 sites, 2 classes, images 3x8x8
    site    domain  train  val  test  classes
    berlin  berlin      8    -     2  2/2
    oslo    oslo        8    -     2  2/2
    """
    root = Path(root).expanduser()
    _check_options(size, channels, val, test, memory_limit)
    files = _scan(root)
    names = _class_names(root, files, classes)
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
    if notes := [*_other_files(root), *_alike(names)]:
        source["notes"] = notes
    preprocessing = preprocessing or Preprocessing.centred(channels)
    return Federation(name or root.resolve().name, sites, names, preprocessing, source)


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
    memory_limit: int = 2 * 2**30,
) -> Site:
    """One new site from `folder/class/image.png`, with the classes of a federation that exists already.

    The options are those of `from_folders`. Without fractions all images are in the train split.

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
        raise BadInput(f"folder {str(folder)!r}: not a folder; {_OF_SITE}")
    files, problems = _scan_site(folder.resolve(), _OF_SITE)
    raise_problems(f"folder {str(folder)!r}", problems)
    names = _class_names(folder, files, classes)
    root = folder.resolve()
    return _sites(root, files, names, size, channels, val, test, seed, group, cache, memory_limit)[0]


def read_image(path: str | Path, shape: tuple[int, int, int]) -> torch.Tensor:
    """One image file as uint8 of shape (C, H, W), decoded and resized as `from_folders` does with a size.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("L", (9, 5)).save(Path(root, "a.png"))
    ...     read_image(Path(root, "a.png"), (3, 4, 4)).shape
    torch.Size([3, 4, 4])
    """
    channels, height, width = shape
    if channels not in _MODES:
        raise BadInput(f"image files have 1, 3 or 4 channels, not {channels}")
    try:
        with Image.open(path) as image:
            upright = _upright(_single(image))
            size = None if (upright.height, upright.width) == (height, width) else (width, height)
            pixels = np.array(_converted(upright, channels, size))
    except Exception as problem:  # Pillow's decoders raise almost anything on broken files
        raise BadInput(f"{str(path)!r} cannot be read: {problem}") from problem
    return torch.from_numpy(np.ascontiguousarray(pixels.reshape(height, width, channels).transpose(2, 0, 1)))


@dataclass(frozen=True)
class Prepared:
    """How an opened image becomes pixels, where resizing is not enough; the name tells caches apart.

    `pixels` returns an image of the wanted size and mode.
    """

    name: str
    pixels: Callable[[Image.Image], Image.Image]


def read_images(
    root: Path,
    paths: Sequence[Path],
    shape: tuple[int, int, int],
    cache: str | Path | bool | None = None,
    memory_limit: int = 2 * 2**30,
    prepared: Prepared | None = None,
) -> torch.Tensor | MappedImages:
    """Many image files below `root` as uint8 of shape (N, C, H, W), resized and cached as `from_folders` does.

    More than `memory_limit` bytes stay in the cache on disk and are read batch by batch.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Image.new("L", (9, 5)).save(Path(root, "a.png"))
    ...     read_images(Path(root), [Path(root, "a.png")], (3, 4, 4), cache=False).shape
    torch.Size([1, 3, 4, 4])
    """
    in_memory = len(paths) * int(np.prod(shape)) <= memory_limit
    files = [_File(path, "", "", "", of_data_set=True) for path in paths]
    return _load(root, files, shape, True, cache, in_memory, prepared)


def _class_names(root: Path, files: Sequence[_File], classes: Sequence[str] | None) -> list[str]:
    found = sorted({file.label for file in files})
    if classes is None:
        return found
    if unknown := [label for label in found if label not in classes]:
        raise BadInput(f"folder {str(root)!r}: class folders {unknown} are not among {list(classes)}; rename them")
    return list(classes)


def _sites(
    root: Path,
    files: Sequence[_File],
    classes: Sequence[str],
    size: int | tuple[int, int] | None,
    channels: int,
    val: float,
    test: float,
    seed: int,
    group: Group | None,
    cache: str | Path | bool | None,
    memory_limit: int,
) -> list[Site]:
    groups = _groups(files, group)
    hw = (size, size) if isinstance(size, int) else size
    shape = (channels, *(hw or _first_size(files)))
    in_memory = len(files) * int(np.prod(shape)) <= memory_limit
    number = {label: i for i, label in enumerate(classes)}
    y = torch.tensor([number[file.label] for file in files], dtype=torch.int64)
    everything = Split(_load(root, files, shape, hw is not None, cache, in_memory), y)
    members: dict[str, list[int]] = {}
    for i, file in enumerate(files):
        members.setdefault(file.site, []).append(i)
    sites = []
    for site, inside in members.items():
        at = np.array(inside)
        whose = None if groups is None else [groups[i] for i in inside]
        parts = _divide([files[i] for i in inside], y[at], whose, val, test, seed)
        splits = {part: everything.subset(at[chosen]) for part, chosen in parts.items()}
        sites.append(Site(site, site, splits.get("train"), splits.get("val"), splits.get("test")))
    if not any(file.part for file in files):
        _check_groups(sites, groups, test)
    return sites


def _check_options(
    size: int | tuple[int, int] | None, channels: int, val: float, test: float, memory_limit: int
) -> None:
    problems = []
    sides = () if size is None else (size,) if isinstance(size, int) else tuple(size)
    if size is not None and (len(sides) not in (1, 2) or not all(isinstance(s, int) and s > 0 for s in sides)):
        problems.append(f"size must be a positive number of pixels or (height, width), got {size!r}")
    if channels not in _MODES:
        problems.append(f"channels must be 1, 3 or 4, got {channels!r}")
    if min(val, test) < 0 or val + test >= 1:
        problems.append(f"val and test must be fractions that leave something to train on, got {val} and {test}")
    if memory_limit < 0:
        problems.append(f"memory_limit is a number of bytes, got {memory_limit}")
    raise_problems("from_folders", problems)


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name not in _NOT_DATA)
    except OSError as error:
        raise BadInput(f"folder {str(folder)!r} cannot be read: {error.strerror or error}") from None


def _folders(folder: Path) -> list[Path]:
    return [p for p in _visible(folder) if p.is_dir()]


def _images_in(folder: Path) -> list[Path]:
    return [p for p in _visible(folder) if p.suffix.lower() in EXTENSIONS and p.is_file()]


def _scan(root: Path) -> list[_File]:
    """All image files, sorted by site, split, class and name."""
    if not root.is_dir():
        raise BadInput(f"folder {str(root)!r}: not a folder; {_LAYOUT}")
    sites = _folders(root)
    if not sites:
        raise BadInput(f"folder {str(root)!r}: it has no site folders; {_LAYOUT}")
    files: list[_File] = []
    stray = _images_in(root)
    problems = [f"it has {len(stray)} images beside its site folders; {_LAYOUT}"] if stray else []
    for site in sites:
        inside, wrong = _scan_site(site)
        files += inside
        problems += wrong
    raise_problems(f"folder {str(root)!r}", problems)
    return files


def _scan_site(site: Path, layout: str = _LAYOUT) -> tuple[list[_File], list[str]]:
    """The image files of one site and what is wrong with its folders."""
    files: list[_File] = []
    problems: list[str] = []
    inner = _folders(site)
    divided = {p.name for p in inner} <= {"train", "val", "test"} and any(_folders(p) for p in inner)
    if divided and (stray := _images_in(site)):
        problems.append(f"{str(site)!r} has {len(stray)} images beside its folders {sorted(p.name for p in inner)}")
    for part, folder in [(p.name, p) for p in inner] if divided else [("", site)]:
        labels = _folders(folder)
        if not labels:
            loose = len(_images_in(folder))
            said = f" but {loose} images (a class? Put all classes of a site into a folder of its own)" if loose else ""
            problems.append(f"{str(folder)!r} has no class folders{said}; {layout}")
        elif beside := _images_in(folder):
            problems.append(f"{str(folder)!r} has {len(beside)} images beside its class folders; {layout}")
        for label in labels:
            images = _images_in(label)
            if inside := [p for p in _folders(label) if any(q.suffix.lower() in EXTENSIONS for q in p.rglob("*"))]:
                also = "beside" if images else "instead of"
                problems.append(f"{str(label)!r} has folders ({inside[0].name!r}) {also} images; {layout}")
            files += [_File(path, site.name, part, label.name) for path in images]
    if not files and not problems:
        problems.append(f"site {site.name!r} has no images ({', '.join(EXTENSIONS)})")
    return files, problems


def _other_files(root: Path) -> list[str]:
    """That files which are no images lie in class folders: perhaps somebody takes them for some."""
    kinds = Counter(
        p.suffix.lower() or "no suffix"
        for site in _folders(root)
        for pattern in ("*/*", "*/*/*")
        for p in site.glob(pattern)
        if p.is_file() and p.suffix.lower() not in EXTENSIONS and not p.name.startswith(".")
    )
    said = ", ".join(f"{n} of {kind}" for kind, n in sorted(kinds.items())[:5])
    return [f"files that are not read: {said} (read are {', '.join(EXTENSIONS)})"] if kinds else []


def _alike(classes: Sequence[str]) -> list[str]:
    """That classes have nearly the same name: perhaps they are one."""
    seen: dict[str, str] = {}
    notes = []
    for name in classes:
        other = seen.setdefault(unicodedata.normalize("NFKC", name).strip().casefold(), name)
        if other != name:
            how = "case, blanks or the way letters are encoded"
            notes.append(f"classes {other!r} and {name!r} differ in {how} alone, and are taken for two")
    return notes


def _groups(files: Sequence[_File], group: Group | None) -> list[str] | None:
    if group is None:
        return None
    if not isinstance(group, str):
        return [str(group(file.path)) for file in files]
    try:
        pattern = re.compile(group)
    except re.error as problem:
        raise BadInput(f"from_folders: group {group!r} is not a regular expression: {problem}") from None
    matches = [pattern.search(file.path.name) for file in files]
    missed = [str(file.path) for file, match in zip(files, matches, strict=True) if match is None]
    if missed:
        raise BadInput(
            f"from_folders: group {group!r} matches nothing in {len(missed)} of {len(files)} file names, "
            f"first {missed[0]!r}"
        )
    return [(m.group(1) or "") if pattern.groups else m.group(0) for m in matches if m is not None]


def _tested_first(
    y: torch.Tensor, groups: Sequence[str] | None, val: float, test: float, seed: int, site: str
) -> dict[str, np.ndarray]:
    """Test images first, then validation images of the rest: a run with other `val` is tested on the same images."""
    first = split(y, {"test": test}, seed, site, groups)
    rest = first["train"]
    of_rest = None if groups is None else [groups[i] for i in rest]
    second = split(y[rest], {"val": val / (1 - test)}, seed, f"{site} val", of_rest)
    return {"train": rest[second["train"]], "val": rest[second["val"]], "test": first["test"]}


def _check_groups(sites: Sequence[Site], groups: Sequence[str] | None, test: float) -> None:
    """Refuse groups so large that nothing is left to test with, which would be found out after training."""
    if groups is not None and test and not any("test" in site.splits for site in sites):
        raise BadInput(
            f"from_folders: group makes {len(set(groups))} groups, too few at every site to leave any for a test: does "
            "the pattern tell patients apart?"
        )


def _divide(
    files: Sequence[_File],
    y: torch.Tensor,
    groups: Sequence[str] | None,
    val: float,
    test: float,
    seed: int,
) -> dict[str, np.ndarray]:
    if not files[0].part:
        return _tested_first(y, groups, val, test, seed, files[0].site)
    if groups is not None:
        home: dict[str, str] = {}
        for file, member in zip(files, groups, strict=True):
            if home.setdefault(member, file.part) != file.part:
                raise BadInput(
                    f"site {file.site!r}: group {member!r} is in both {home[member]} and {file.part} "
                    f"({str(file.path)!r}); move its images into one of them"
                )
    parts = np.array([file.part for file in files])
    return {part: np.flatnonzero(parts == part) for part in ("train", "val", "test")}


def _first_size(files: Sequence[_File]) -> tuple[int, int]:
    """Height and width of the first image that can be opened (one that cannot is reported when decoding)."""
    for file in files:
        try:
            with Image.open(file.path) as image:
                upright = _upright(image)
                return upright.height, upright.width
        except Exception:  # Pillow's decoders raise almost anything on broken files
            continue
    raise BadInput(f"none of the {len(files)} images can be read, first {str(files[0].path)!r}")


def _load(
    root: Path,
    files: Sequence[_File],
    shape: tuple[int, ...],
    resize: bool,
    cache: str | Path | bool | None,
    in_memory: bool,
    prepared: Prepared | None = None,
) -> torch.Tensor | MappedImages:
    full = (len(files), *shape)
    if _counting.get():
        return torch.zeros(len(files), shape[0], 1, 1, dtype=torch.uint8)
    if cache is False:
        if not in_memory:
            raise BadInput(f"folder {str(root)!r} is larger than memory_limit and needs a cache; set cache=FOLDER")
        return torch.from_numpy(_decode(root, files, np.empty(full, np.uint8), resize, prepared))
    path = _cache_folder(cache) / f"{_key(root, files, shape, resize, prepared)}.npy"
    if not _usable(path, full):
        try:
            _write(path, root, files, full, resize, prepared)
        except OSError as problem:
            if not in_memory:
                raise BadInput(
                    f"folder {str(root)!r}: cannot write the cache {str(path.parent)!r} ({problem}), and the "
                    "images exceed memory_limit; set cache=FOLDER to a place with room, or raise memory_limit"
                ) from problem
            warnings.warn(
                f"cannot write the cache {str(path.parent)!r} ({problem}): {len(files)} images are decoded "
                "into memory, now and in every later run until cache=FOLDER can be written",
                stacklevel=3,
            )
            return torch.from_numpy(_decode(root, files, np.empty(full, np.uint8), resize, prepared))
    return torch.from_numpy(np.load(path)) if in_memory else MappedImages(path)


def _cache_folder(cache: str | Path | bool | None) -> Path:
    if cache is None or isinstance(cache, bool):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fednorms"
    return Path(cache).expanduser()


def _key(root: Path, files: Sequence[_File], shape: Sequence[int], resize: bool, prepared: Prepared | None) -> str:
    """Changes when a file is added, removed or written to, or when the wanted shape changes."""
    digest = hashlib.blake2b(digest_size=16)
    how = [prepared.name] if prepared else []
    upright = [] if all(file.of_data_set for file in files) else ["upright"]
    digest.update(json.dumps([_FORMAT, str(root.resolve()), list(shape), resize, *how, *upright]).encode())
    for file in files:
        found = file.path.stat()
        # Copies may keep the time of a change, but not the time at which the file was put there.
        when = [found.st_mtime_ns] if file.of_data_set else [found.st_mtime_ns, found.st_ctime_ns]
        line = [file.path.relative_to(root).as_posix(), *when, found.st_size]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def _usable(path: Path, full: tuple[int, ...]) -> bool:
    try:
        stored = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return stored.shape == full and stored.dtype == np.uint8


def _write(
    path: Path,
    root: Path,
    files: Sequence[_File],
    full: tuple[int, ...],
    resize: bool,
    prepared: Prepared | None,
) -> None:
    """Decode into a file of another name, then rename: a cache file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("*.partial"):
        if time.time() - old.stat().st_mtime > 24 * 3600:  # left by a killed process
            old.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as out:
            np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": full})
            offset = out.tell()
            # Reserved at once: a full disk is an error here, and not a crash while the map is written.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(out.fileno(), 0, offset + int(np.prod(full)))
            else:
                out.truncate(offset + int(np.prod(full)))
        images = np.memmap(name, np.uint8, "r+", offset, full)
        _decode(root, files, images, resize, prepared)
        images.flush()
        del images
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _decode(
    root: Path, files: Sequence[_File], images: np.ndarray, resize: bool, prepared: Prepared | None
) -> np.ndarray:
    """Fill `images` (N,C,H,W) from the files, several at a time, or say which cannot be read."""
    _, channels, height, width = images.shape
    sizes: list[tuple[int, int]] = [(height, width)] * len(files)
    brightest: list[int] = []  # pixel of each image of 16 bits

    def one(i: int) -> str | None:
        try:
            with Image.open(files[i].path) as stored:
                # Cameras store how they were held. Papers' programs do not look at it, so data sets are read as stored.
                image = stored if files[i].of_data_set else _upright(_single(stored))
                sizes[i] = (image.height, image.width)
                if image.mode.startswith("I"):
                    brightest.append(int(np.asarray(image).max(initial=0)))
                if not resize and sizes[i] != (height, width):
                    return None
                ready = image if prepared is None else prepared.pixels(image)
                pixels = np.asarray(_converted(ready, channels, (width, height) if resize else None))
        except Exception as problem:  # Pillow's decoders raise almost anything on broken files
            return f"{str(files[i].path)!r} cannot be read: {problem}"
        images[i] = pixels.reshape(height, width, channels).transpose(2, 0, 1)
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        unreadable = [problem for problem in pool.map(one, range(len(files))) if problem]
    problems = unreadable[:_NAMED]
    if len(unreadable) > _NAMED:
        problems.append(f"and {len(unreadable) - _NAMED} more that cannot be read")
    other = [i for i, found in enumerate(sizes) if found != (height, width)]
    if other and not resize:
        same = next(i for i in range(len(files)) if sizes[i] == (height, width))
        (high, wide), path = sizes[other[0]], str(files[other[0]].path)
        problems.append(
            f"images differ in size: {str(files[same].path)!r} is {height}x{width} (height x width), "
            f"{path!r} is {high}x{wide}; set size= to resize them"
        )
    raise_problems(f"folder {str(root)!r}", problems)
    if brightest and max(brightest) < 2**14:
        warnings.warn(
            f"folder {str(root)!r}: {len(brightest)} images of 16 bits have no pixel above {max(brightest)}: they are "
            "dark and coarse when scaled to eight bits. Scale their values to 0 to 65535 first.",
            stacklevel=3,
        )
    return images


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _single(image: Image.Image) -> Image.Image:
    """Refuse a stack of slices, of which one alone would be read; of moving pictures the first frame is meant."""
    if image.format == "TIFF" and (pages := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it holds {pages} pages; store each as an image of its own")
    return image


def _upright(image: Image.Image) -> Image.Image:
    """A photograph as it was taken: cameras store how they were held."""
    try:
        turn = _TURNS.get(image.getexif().get(0x0112, 1))
    except Exception:  # damaged EXIF says nothing about the pixels
        return image
    return image if turn is None else image.transpose(turn)


def _converted(image: Image.Image, channels: int, size: tuple[int, int] | None) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey (X-rays): scaled to eight bits, where Pillow itself would clip.
        pixels = np.asarray(image)
        low, high = int(pixels.min(initial=0)), int(pixels.max(initial=0))
        if low < 0 or high > 65535:
            raise ValueError(f"pixels of {low} to {high}; expected 0 to 65535: store it as 8 or 16 bits")
        image = Image.fromarray((pixels // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; store it as 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert(_MODES[channels])
    return image if size is None else image.resize(size, Image.Resampling.BILINEAR)
