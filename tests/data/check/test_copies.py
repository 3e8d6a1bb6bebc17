"""Exact and near copies, against slow comparisons of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fednorms.data.check import copies
from fednorms.data.check.images import Seen
from fednorms.data.folders.look import look_at


def scene(seed, size=64):
    """An image with structure at several scales."""
    r = np.random.RandomState(seed)
    coarse = Image.fromarray(r.randint(0, 256, (8, 8, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    fine = r.randint(-20, 20, (size, size, 3))
    return Image.fromarray(np.clip(np.asarray(coarse, np.int16) + fine, 0, 255).astype(np.uint8))


def seen(images):
    return [Seen("oslo", "train", 0, str(i), look_at(image)) for i, image in enumerate(images)]


def slow_pairs(images):
    """All pairs by definition: few bits of the outline differ, and thumbnails agree."""
    found = []
    for a in range(len(images)):
        for b in range(a + 1, len(images)):
            one, two = images[a].look, images[b].look
            bits = bin(one.outline ^ two.outline).count("1")
            gap = np.abs(one.gray.astype(int) - two.gray.astype(int)).mean()
            near = bits <= copies.BITS and gap <= min(copies.GRAY, copies.PART * one.gray.std())
            if near and one.pixels != two.pixels and min(one.gray.std(), two.gray.std()) >= copies.FLAT:
                found.append((a, b))
    return found


def test_changed_copies_are_found_and_others_are_not(tmp_path):
    first = [scene(seed) for seed in range(40)]
    first[3].save(tmp_path / "3.jpg", quality=70)
    smaller = first[5].resize((48, 48), Image.Resampling.BILINEAR)
    brighter = first[7].point(lambda value: min(255, value + 3))
    images = seen([*first, Image.open(tmp_path / "3.jpg"), smaller, brighter])
    found = copies.near_copies(images)
    assert {(3, 40), (5, 41), (7, 42)} == set(found)
    assert found == slow_pairs(images)


@pytest.mark.parametrize("block", [2, 7, 2048])
def test_blocks_do_not_change_what_is_found(monkeypatch, block):
    monkeypatch.setattr(copies, "_BLOCK", block)
    base = [scene(seed) for seed in range(12)]
    images = seen([image.point(lambda v, k=k: min(255, v + k)) for image in base for k in range(3)])
    assert copies.near_copies(images) == slow_pairs(images)
    assert len(copies.near_copies(images)) >= 12


def test_counting_bits_without_numpy_2(monkeypatch):
    words = np.random.RandomState(0).randint(0, 2**63, 50, np.uint64)
    expected = [bin(int(word)).count("1") for word in words]
    assert copies._bits(words).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert copies._bits(words).tolist() == expected


def test_exact_copies_are_equal_pixels_whatever_the_file(tmp_path):
    image = scene(1)
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.bmp")
    images = seen([Image.open(tmp_path / "a.png"), Image.open(tmp_path / "b.bmp"), scene(2), image.rotate(90)])
    assert copies.exact_copies(images) == [[0, 1]]


def test_images_without_contrast_and_small_ones_are_not_compared():
    flat = [Image.new("RGB", (64, 64), (90 + k, 90, 90)) for k in range(3)]
    tiny = [scene(1, 16), scene(1, 16).point(lambda v: min(255, v + 1))]
    assert copies.near_copies(seen([*flat, *tiny])) == []
    assert copies.near_copies([]) == []
