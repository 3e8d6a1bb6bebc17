"""Folders as people download them, and splits that keep together what belongs together."""

from __future__ import annotations

import numpy as np
import pytest

from fednorms.core.errors import BadInput
from fednorms.data import from_folders, site_from_folder
from tests.support.layouts import first_values, picture, sizes


def filled(root, folders, each=4):
    """Write `each` images with different values into every folder."""
    value = 0
    for folder in folders:
        for i in range(each):
            picture(root / folder / f"{i}.png", value)
            value += 1
    return root


def load(root, **options):
    return from_folders(root, **{"cache": False, "val": 0.0, "test": 0.25, **options})


PLAIN = ["bern/cat", "bern/dog", "oslo/cat", "oslo/dog"]


@pytest.mark.parametrize(
    "folders",
    [
        [f"archive/{p}" for p in PLAIN],
        [f"archive/v2/{p}" for p in PLAIN],
        [f"images/{p}" for p in PLAIN],
        [f"{p.split('/')[0]}/images/{p.split('/')[1]}" for p in PLAIN],
        [f"{p}/images" for p in PLAIN],
        ["bern/Cat", "bern/dog", "oslo/cat", "oslo/Dog "],
    ],
)
def test_the_same_federation_in_other_folders(tmp_path, folders):
    plain, other = load(filled(tmp_path / "a", PLAIN)), load(filled(tmp_path / "b", folders), name="a")
    assert [key.casefold().strip() for key in other.classes] == list(plain.classes)
    assert sizes(other) == sizes(plain)
    for one, two in zip(plain.sites, other.sites, strict=True):
        for part in one.splits:
            assert first_values(one.splits[part]) == first_values(two.splits[part])


@pytest.mark.parametrize(
    "names", [("train", "val", "test"), ("Training", "Validation", "Testing"), ("TRAIN", "valid", "Test")]
)
def test_splits_inside_sites_and_above_them(tmp_path, names):
    inside = filled(
        tmp_path / "inside", [f"{s}/{n}/{c}" for s in ("bern", "oslo") for n in names for c in ("cat", "dog")]
    )
    above = filled(
        tmp_path / "above", [f"{n}/{s}/{c}" for n in names for s in ("bern", "oslo") for c in ("cat", "dog")]
    )
    expected = {s: {"train": 8, "val": 8, "test": 8} for s in ("bern", "oslo")}
    assert sizes(load(inside)) == expected
    assert sizes(load(above)) == expected


def test_splits_above_classes_are_one_site(tmp_path):
    found = load(filled(tmp_path / "pets", ["train/cat", "train/dog", "test/cat", "test/dog"]))
    assert sizes(found) == {"pets": {"train": 8, "test": 8}}
    sorted_values = [sorted(first_values(found.sites[0].splits[part])) for part in ("train", "test")]
    assert sorted_values == [list(range(8)), list(range(8, 16))]


def test_classes_that_one_site_tells_apart_are_two(tmp_path):
    found = load(filled(tmp_path / "letters", ["bern/a", "bern/A", "oslo/a", "oslo/-1", "oslo/1"]))
    assert found.classes == ("-1", "1", "A", "a")
    (note,) = found.source["notes"]
    assert "counted as two" in note


def test_a_new_sites_folders_take_the_spelling_of_the_federation(tmp_path):
    folder = filled(tmp_path / "clinic", ["Malignant", "be-nign"])
    site = site_from_folder(folder, ["benign", "malignant"], cache=False)
    assert np.bincount(site.train.y).tolist() == [4, 4]
    with pytest.raises(BadInput, match="cyst are not among"):
        site_from_folder(filled(tmp_path / "other", ["cyst"]), ["benign", "malignant"], cache=False)


def test_what_is_not_a_layout_is_said_about_the_given_folder(tmp_path):
    filled(tmp_path / "flat", ["cat", "dog"])
    with pytest.raises(BadInput, match=r"expected root/site/class/image\.png"):
        load(tmp_path / "flat")
    filled(tmp_path / "deep", ["bern/cat/left", "bern/cat/right", "oslo/cat/left"])
    with pytest.raises(BadInput, match="instead of images"):
        load(tmp_path / "deep")


def homes(federation, whose):
    """The splits in which the images of each group are; a group is found from an image's value."""
    found = {}
    for site in federation.sites:
        for part, split in site.splits.items():
            for value in first_values(split):
                found.setdefault(whose(site.name, value), set()).add(part)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_groups_across_sites_stay_in_one_split_and_shares_hold(tmp_path, seed):
    value = 0
    whose = {}
    for site in ("bern", "oslo"):
        for label in ("cat", "dog"):
            for i in range(40):
                lesion = (
                    f"L{i // 2:02d}{label}" if i < 20 else f"L{i // 2:02d}{label}{site}"
                )  # ten lesions at both sites
                picture(tmp_path / "data" / site / label / f"{lesion}_{i}.png", value)
                whose[value] = lesion
                value += 1
    options = {"group": r"^([^_]+)_", "val": 0.1, "test": 0.2, "seed": seed}
    across = load(tmp_path / "data", group_across=True, **options)
    assert all(len(parts) == 1 for parts in homes(across, lambda _, v: whose[v]).values())
    for site in across.sites:
        assert {part: len(split) for part, split in site.splits.items()} == {"train": 56, "val": 8, "test": 16}
        assert np.bincount(site.test.y).tolist() == [8, 8]
    apart = load(tmp_path / "data", **options)
    assert all(len(parts) == 1 for parts in homes(apart, lambda s, v: (s, whose[v])).values())


def test_split_folders_that_divide_a_group_across_sites_are_refused(tmp_path):
    picture(tmp_path / "d" / "bern" / "train" / "cat" / "L1_0.png", 0)
    picture(tmp_path / "d" / "oslo" / "test" / "cat" / "L1_1.png", 1)
    picture(tmp_path / "d" / "oslo" / "train" / "cat" / "L2_1.png", 2)
    assert sizes(load(tmp_path / "d", group=r"(L\d)"))["bern"] == {"train": 1}
    with pytest.raises(BadInput, match='group "L1" is in both train and test'):
        load(tmp_path / "d", group=r"(L\d)", group_across=True)


def test_files_that_a_pattern_does_not_find_can_be_on_their_own(tmp_path):
    for i in range(12):
        picture(tmp_path / "d" / "bern" / "cat" / (f"p{i // 3}_{i}.png" if i < 6 else f"{i}.png"), i)
    with pytest.raises(BadInput, match=r'write "\(p\\d\)\|.\+"'):
        load(tmp_path / "d", group=r"(p\d)")
    found = homes(load(tmp_path / "d", group=r"(p\d)|.+"), lambda _, v: f"p{v // 3}" if v < 6 else v)
    assert len(found) == 8
    assert all(len(parts) == 1 for parts in found.values())
