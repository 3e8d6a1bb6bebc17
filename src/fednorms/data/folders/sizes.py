"""Sizes of image files, from their headers: nothing is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median_high

from fednorms.data.folders.decode import stored_size
from fednorms.data.folders.scan import scan

Size = tuple[int, int]  # height and width


def sizes_in(root: str | Path) -> dict[str, Counter[Size]]:
    """How many images of each size every site of a folder has; files that cannot be opened are left out.

    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "oslo", "cat").mkdir(parents=True)
    ...     for i in (4, 9):
    ...         Image.new("RGB", (i, 6)).save(Path(root, "oslo", "cat", f"{i}.png"))
    ...     sizes_in(root)
    {'oslo': Counter({(6, 4): 1, (6, 9): 1})}
    """
    found: dict[str, Counter[Size]] = {}
    for file in scan(Path(root).expanduser()):
        counts = found.setdefault(file.site, Counter())
        if size := stored_size(file):
            counts[size] += 1
    return found


def differ(sizes: Mapping[str, Mapping[Size, int]]) -> bool:
    """Whether the images of a folder have more than one size.

    >>> differ({"oslo": {(6, 4): 3}, "bern": {(6, 4): 1}}), differ({"oslo": {(6, 4): 3}, "bern": {(6, 5): 1}})
    (False, True)
    """
    return len({size for site in sizes.values() for size in site}) > 1


def shown(sizes: Mapping[Size, int]) -> str:
    """The sizes of a site in a few words, the smallest image first.

    >>> shown({(6, 4): 2}), shown({(6, 9): 1, (6, 4): 1})
    ('6x4', '6x4 to 6x9')
    """
    ordered = sorted(sizes, key=lambda size: (size[0] * size[1], size))
    texts = [f"{height}x{width}" for height, width in ordered]
    return " to ".join(dict.fromkeys([texts[0], texts[-1]])) if texts else "-"


def common_side(sizes: Mapping[str, Mapping[Size, int]]) -> int:
    """The side of a square to which all images can be resized: the median of their shorter sides.

    >>> common_side({"oslo": {(6, 4): 1, (8, 9): 2}})
    8
    """
    sides = [min(size) for site in sizes.values() for size, count in site.items() for _ in range(count)]
    return median_high(sides)
