"""Patients and lesions that a data set names stay with the images: in splits, packs, validation and intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import fednorms as fn
from fednorms.data.changes import with_validation
from fednorms.data.federation import Split
from fednorms.data.pack import pack
from fednorms.data.packed import unpacked

SIDE = 8


@pytest.fixture
def table(tmp_path):
    """A table of two centers; three pictures of each of twelve patients, whose gray says who it is."""
    lines = ["image,label,center,patient"]
    for patient in range(12):
        for i in range(3):
            name = f"im{patient}-{i}.png"
            Image.new("RGB", (SIDE, SIDE), (10 * patient, i, 0)).save(tmp_path / name)
            lines.append(f"{name},{patient // 2 % 2},{patient % 2},who-{patient}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return tmp_path


def opened(table, **options):
    return fn.federation("centres", root=table, size=SIDE, **options)


def patients_by_pixel(split):
    return [int(x) // 10 for x in split.x[torch.arange(len(split))][:, 0, 0, 0]]


def test_each_image_has_its_patient(table):
    for site in opened(table, test=0.3).sites:
        for split in site.splits.values():
            assert list(split.groups) == [f"who-{p}" for p in patients_by_pixel(split)]


def test_a_pack_keeps_patients_as_numbers(table, tmp_path):
    made = opened(table, test=0.3)
    file = pack(made, tmp_path / "p.fnpack")
    assert b"who-" not in file.read_bytes()
    seen = {}
    for before, after in zip(made.sites, unpacked(file).sites, strict=True):
        for part, split in before.splits.items():
            for name, number in zip(split.groups, after.splits[part].groups, strict=True):
                assert seen.setdefault(name, number) == number
    assert len(set(seen.values())) == len(seen) == 12


def test_a_pack_knows_which_splits_have_no_patients(table, tmp_path):
    made = opened(table, test=0.3)
    first, second = made.sites
    bare = fn.Federation("mixed", [_without_groups(first), second], made.classes, made.preprocessing)
    again = unpacked(pack(bare, tmp_path / "p.fnpack"))
    assert [split.groups is None for site in again.sites for split in site.splits.values()] == [True] * 2 + [False] * 2


def _without_groups(site):
    from dataclasses import replace

    return replace(site, **{part: Split(split.x, split.y) for part, split in site.splits.items()})


def test_validation_keeps_patients_together(table):
    for site in with_validation(opened(table, test=0.3), 0.3).sites:
        assert site.val is not None
        assert set(site.train.groups).isdisjoint(site.val.groups)


@pytest.mark.parametrize("protocol", ["flamby", "lesions"])
def test_lesions_of_fed_isic2019(tmp_path, protocol):
    folder = tmp_path / "ISIC_2019_Training_Input"
    folder.mkdir()
    lines = ["image,target,center,fold,lesion_id"]
    for i in range(24):
        Image.fromarray(np.full((9, 12, 3), 9 * i, np.uint8)).save(folder / f"ISIC_{i}.jpg")
        lines.append(f"ISIC_{i},{i % 2},{i // 12},{'test' if i % 4 == 3 else 'train'},{f'L{i // 2}' if i else ''}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    made = fn.federation("fed-isic2019", root=tmp_path, protocol=protocol, complete=False, size=8)
    groups = sorted(str(g) for site in made.sites for split in site.splits.values() for g in split.groups)
    assert groups == sorted(["ISIC_0", "L0", *(f"L{i // 2}" for i in range(2, 24))])
