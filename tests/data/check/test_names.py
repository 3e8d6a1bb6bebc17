"""Patients in file names: found where files share an id, and not in counters or classes."""

from __future__ import annotations

import re

import pytest

from fednorms.data.check.names import likely_ids
from fednorms.data.folders.divide import groups_of
from fednorms.data.folders.scan import ImageFile


def asked(names, labels=None, sites=None):
    return likely_ids(names, sites or ["oslo"] * len(names), labels or [i % 2 for i in range(len(names))])


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("patient{p:03d}_{i}.png", "patient{p:03d}"),
        ("scan-Subject{p}-{i}.jpg", "Subject{p}"),
        ("A{p:04d}_{i}.png", "A{p:04d}"),
        ("2019-{p:03d}-{i}.tif", "2019-{p:03d}"),
        ("{p:03d}{side}.png", "{p:03d}"),
        ("case_{p}_slice_{i}.png", "case_{p}"),
    ],
)
def test_ids_are_found_and_the_pattern_works_as_a_group(name, whose):
    files = [(name.format(p=p, i=i, side="LR"[i % 2]), whose.format(p=p)) for p in range(1, 21) for i in range(2)]
    found = asked([n for n, _ in files])
    assert found is not None
    assert list(found.ids) == [w for _, w in files]
    images = [ImageFile(__import__("pathlib").Path("/x", n), "oslo", "", "a") for n, _ in files]
    assert groups_of(images, found.pattern) == [w for _, w in files]


@pytest.mark.parametrize(
    "names",
    [
        [f"ISIC_{i:07d}.jpg" for i in range(60)],
        [f"frame_{i:04d}.jpg" for i in range(60)],
        [f"{i}.png" for i in range(60)],
        [f"{56 + i % 2:03d}_{i:04d}.jpg" for i in range(60)],  # a number of the class
        [f"IMG_20240101_{i:06d}.jpg" for i in range(60)],  # a day
        ["a.png", "b.png"],
    ],
)
def test_counters_classes_and_dates_are_not_ids(names):
    assert asked(names) is None


def test_ids_of_one_site_only_leave_other_files_on_their_own():
    names = [f"patient{i // 3}_{i}.png" for i in range(30)] + [f"{i}.png" for i in range(30)]
    found = asked(names, sites=["oslo"] * 30 + ["bern"] * 30)
    assert found is not None
    assert found.pattern.endswith("|.+")
    assert found.ids[30:] == (None,) * 30
    groups = [re.search(found.pattern, name) for name in names]
    assert len({m.group(1) or m.group(0) for m in groups}) == 10 + 30
