"""Find images that are there more than once: exact copies, and near copies by their outlines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fednorms.data.check.images import Seen

BITS = 3  # two outlines of 64 bits that differ in at most so many may show the same image
GRAY = 4.0  # mean difference of thumbnails, of 255, up to which they do
PART = 0.2  # the same, as a part of the thumbnail's standard deviation: sketches have little contrast
SMALLEST = 32  # pixels of the shorter side: handwritten digits of 28 pixels look alike without being copies
FLAT = 8.0  # standard deviation of a thumbnail, of 255, below which its outline is noise
_BLOCK = 2048  # outlines that are compared with each other at once


def exact_copies(images: Sequence[Seen]) -> list[list[int]]:
    """Positions of images with equal pixels, in groups of two or more."""
    same: dict[str, list[int]] = {}
    for i, image in enumerate(images):
        if image.look.pixels:
            same.setdefault(image.look.pixels, []).append(i)
    return [group for group in same.values() if len(group) > 1]


def near_copies(images: Sequence[Seen]) -> list[tuple[int, int]]:
    """Pairs of images that are not equal but look the same: resized, compressed again, slightly brighter or cropped.

    Outlines (dHash) find candidates: those that differ in at most three bits share one of four quarters, so only images
    with an equal quarter are compared. Then their thumbnails must agree, too. Of equal images only the first is
    compared. Images without contrast, and those of fewer than 32 pixels, are left out.
    """
    large = [(i, image.look) for i, image in enumerate(images) if min(image.look.height, image.look.width) >= SMALLEST]
    first = list({look.pixels: i for i, look in reversed(large)}.values())
    if not first:
        return []
    at = np.array(sorted(first))
    gray = np.stack([images[i].look.gray for i in at]).astype(np.int16)
    sharp = gray.std(1) >= FLAT
    at, gray = at[sharp], gray[sharp]
    contrast = gray.std(1)
    outlines = np.array([images[i].look.outline for i in at], np.uint64)
    pairs = set[tuple[int, int]]()
    for quarter in range(BITS + 1):
        word = (outlines >> np.uint64(16 * quarter)) & np.uint64(0xFFFF)
        for a, b in _alike(outlines, word):
            near = np.abs(gray[a] - gray[b]).mean(1) <= np.minimum(GRAY, PART * contrast[a])
            pairs.update(zip(at[a[near]].tolist(), at[b[near]].tolist(), strict=True))
    return sorted((min(pair), max(pair)) for pair in pairs)


def _alike(outlines: np.ndarray, word: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of positions with an equal word and outlines that differ in at most `BITS` bits."""
    order = np.argsort(word, kind="stable")
    starts = np.flatnonzero(np.diff(word[order], prepend=word[order][:1] + np.uint64(1)))
    for bucket in np.split(order, starts[1:]) if len(order) else ():
        for i in range(0, len(bucket), _BLOCK):
            rows = bucket[i : i + _BLOCK]
            for j in range(i, len(bucket), _BLOCK):
                columns = bucket[j : j + _BLOCK]
                if len(rows) == 1 and i == j:
                    continue
                close = _bits(outlines[rows][:, None] ^ outlines[columns][None, :]) <= BITS
                a, b = np.nonzero(np.triu(close, 1) if i == j else close)
                if len(a):
                    yield rows[a], columns[b]


def _bits(words: np.ndarray) -> np.ndarray:
    """The number of bits that are set in each 64-bit word.

    >>> _bits(np.array([0, 255, 2**63], np.uint64)).tolist()
    [0, 8, 1]
    """
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.asarray(np.bitwise_count(words))
    return _OF_BYTE[words[..., None].view(np.uint8)].sum(-1)


_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)
