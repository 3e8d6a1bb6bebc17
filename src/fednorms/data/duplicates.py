"""Find images that a federation has more than once: in training and test data, or with two labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fednorms.data.federation import Federation, Split, with_splits
from fednorms.data.folders.listed import ListedImages
from fednorms.data.folders.look import looks

_MOST = 4 * 2**30  # bytes of pixels that are compared


def duplicates(federation: Federation) -> list[str]:
    """Notes about images with equal pixels (only exact copies).

    A model may have memorized a test image that is also trained on (at any site), and of equal images with two labels
    one label is wrong. Copies within training data or within test data are not counted: sites may share a test set.

    >>> from fednorms.data import from_arrays
    >>> x = np.arange(3, dtype=np.uint8).reshape(3, 1, 1)
    >>> duplicates(from_arrays({"a": {"train": (x[:2], [0, 1]), "test": (x[1:], [0, 0])}}, classes=["cat", "dog"]))
    ['1 of 2 test images is also trained on (first at site a)', '1 image has two labels']
    """
    images_in_all = sum(len(split) for site in federation.sites for split in site.splits.values())
    if images_in_all * int(np.prod(federation.shape)) > _MOST:
        return ["too many images to search for copies"]
    trained: dict[bytes, set[int]] = {}
    for site in federation.sites:
        for part in ("train", "val"):
            for digest, label in _images(site.splits.get(part)):
                trained.setdefault(digest, set()).add(label)
    tests = {site.name: list(_images(site.splits.get("test"))) for site in federation.sites}
    known = [name for name, images in tests.items() for digest, _ in images if digest in trained]
    total = sum(map(len, tests.values()))
    notes = []
    if known:
        verb = "is" if len(known) == 1 else "are"
        notes.append(f"{len(known):,} of {total:,} test images {verb} also trained on (first at site {known[0]})")
    for images in tests.values():
        for digest, label in images:
            trained.setdefault(digest, set()).add(label)
    if both := sum(len(labels) > 1 for labels in trained.values()):
        notes.append(f"{both:,} image{'s have' if both > 1 else ' has'} two labels")
    return notes


def without_copies(federation: Federation, cache: str | Path | bool | None = None) -> Federation:
    """Leave out all but one of equal images: a test image stays, then one for validation, then the first.

    Equal images with two labels are all left out, because one label is wrong. `source["copies_dropped"]` says how many.
    Files that are only listed are looked at; `cache` keeps what was seen.

    >>> from fednorms.data import from_arrays
    >>> x = np.arange(3, dtype=np.uint8).reshape(3, 1, 1)
    >>> left = without_copies(from_arrays({"a": {"train": (x, [0, 1, 0]), "test": (x[1:2], [1])}}, classes=["0", "1"]))
    >>> left.site("a")
    Site('a', domain='a', train=2, test=1)
    """
    places = {
        (site.name, part): list(_images(site.splits.get(part), cache))
        for part in ("test", "val", "train")
        for site in federation.sites
    }
    labels: dict[bytes, set[int]] = {}
    for images in places.values():
        for digest, label in images:
            labels.setdefault(digest, set()).add(label)
    seen = {digest for digest, both in labels.items() if len(both) > 1}
    kept: dict[tuple[str, str], list[int]] = {}
    for place, images in places.items():
        kept[place] = []
        for i, (digest, _) in enumerate(images):
            if digest not in seen:
                kept[place].append(i)
                seen.add(digest)
    dropped = sum(len(images) - len(kept[place]) for place, images in places.items())
    if not dropped:
        return federation
    sites = [
        with_splits(site, {part: split.subset(kept[site.name, part]) for part, split in site.splits.items()})
        for site in federation.sites
    ]
    note = f"{dropped:,} {'copy was' if dropped == 1 else 'copies were'} left out"
    source = {**federation.source, "copies_dropped": dropped, "notes": [*federation.source.get("notes", []), note]}
    return replace(federation, sites=sites, source=source)


def _images(split: Split | None, cache: str | Path | bool | None = None) -> Iterator[tuple[bytes, int]]:
    if split is None:
        return
    if isinstance(split.x, ListedImages):
        files = split.x.files
        for path, look, label in zip(files, looks(split.x.path, files, cache), split.y.tolist(), strict=True):
            yield (look.pixels or str(path)).encode(), label
        return
    for rows in torch.arange(len(split)).split(256):
        x, y = split.batch(rows)
        for image, label in zip(x.cpu().numpy(), y.tolist(), strict=True):
            yield hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=16).digest(), label
