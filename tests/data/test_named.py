"""The embedded digits-shift and federations by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fednorms.core.errors import BadInput
from fednorms.data import Preprocessing, federations
from fednorms.data.digits_shift import digits_shift, division
from fednorms.data.folders import from_folders
from fednorms.data.partition import partition
from fednorms.data.registry import federation


@pytest.fixture(scope="module")
def digits():
    return digits_shift()


def test_all_digits_are_used_and_none_twice():
    parts = [at for site in division().values() for at in site.values()]
    assert len(parts) == 15
    assert sorted(np.concatenate(parts).tolist()) == list(range(1797))
    for a, b in combinations(parts, 2):
        assert not set(a.tolist()) & set(b.tolist())


def test_five_sites_of_one_shape_with_every_class_everywhere(digits):
    assert len(digits.clients) == len(digits.domains) == 5
    assert not digits.unseen
    assert digits.shape == (3, 16, 16)
    assert digits.classes == tuple("0123456789")
    for site in digits.sites:
        n = sum(map(len, site.splits.values()))
        assert abs(n - 1797 / 5) < 2
        for part, share in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
            split = site.splits[part]
            assert abs(len(split) - share * n) < 3
            assert split.x.dtype == torch.uint8
            counts = torch.bincount(split.y, minlength=10)
            assert counts.min() > 0
            assert counts.max() - counts.min() <= 6


def test_labels_belong_to_the_images(digits):
    source = load_digits()
    for site, parts in division().items():
        for part, at in parts.items():
            assert digits.site(site).splits[part].y.tolist() == source.target[at].tolist()
    at = division()["clean"]["test"]
    x = digits.site("clean").test.x[:, 0].double() / 255
    # Bilinear from 8 to 16 keeps the sum of a 2x2 block near the pixel it came from.
    blocks = x.unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2)).flatten(1)
    original = torch.from_numpy(source.images[at] / 16).flatten(1)
    for i in range(len(at)):
        assert int(((blocks[i] - original) ** 2).sum(1).argmin()) == i


def test_sites_look_different_and_digits_of_a_site_alike(digits):
    mean = {s.name: (s.train.x.double() / 255).mean((0, 2, 3)) for s in digits.sites}
    contrast = {s.name: (s.train.x.double() / 255).std() for s in digits.sites}
    torch.testing.assert_close(mean["clean"] + mean["negative"], torch.ones(3).double(), atol=0.05, rtol=0)
    assert contrast["faint"] < contrast["foggy"] < contrast["clean"]
    assert mean["faint"][0] > mean["faint"][1] > mean["faint"][2], "a tint"
    poster = digits.site("poster").train.x.double()
    assert (poster[:, 0] - poster[:, 1]).abs().mean() > 30, "colours"


def test_deterministic_whatever_the_state_of_random_generators(digits):
    torch.manual_seed(123)
    assert digits_shift().fingerprint() == digits.fingerprint()
    assert digits_shift(seed=1).fingerprint() != digits.fingerprint()
    assert division(1)["clean"]["train"].tolist() != division(0)["clean"]["train"].tolist()


@pytest.mark.parametrize("size", [8, 20, 32])
def test_other_sizes(size):
    fed = digits_shift(size=size)
    assert fed.shape == (3, size, size)
    assert torch.equal(fed.site("foggy").train.y, digits_shift().site("foggy").train.y)


def test_refuses_sizes_out_of_range():
    for size in (0, 7, 10_000):
        with pytest.raises(BadInput, match="size must be 8 to 512"):
            digits_shift(size=size)


def test_refuses_a_division_that_leaves_nothing_to_train_on():
    for val, test in ((0.1, 0.9), (0.5, 0.5), (-0.1, 0.2)):
        with pytest.raises(BadInput, match="must leave images to train on"):
            digits_shift(val=val, test=test)


def test_by_name(digits):
    assert federation("digits-shift").fingerprint() == digits.fingerprint()
    assert federation("digits-shift", size=8, seed=2, val=0.2, test=0.3).fingerprint() == (
        digits_shift(8, 2, 0.2, 0.3).fingerprint()
    )
    assert digits.preprocessing == Preprocessing.centered(3)
    assert federation(digits) is digits
    assert "digits-shift" in federations()


def test_by_path(tmp_path):
    for site in ("a", "b"):
        for i in range(10):
            (tmp_path / "d" / site / "cat").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / "d" / site / "cat" / f"{i}.png")
    expected = federation(tmp_path / "d").fingerprint()
    for spec, root in (
        (str(tmp_path / "d"), None),
        (f"folder:{tmp_path / 'd'}", None),
        ("folder:d", tmp_path),
        ("d", tmp_path),
    ):
        assert federation(spec, root=root).fingerprint() == expected
    assert federation(tmp_path / "d", size=4).shape == (3, 4, 4)
    assert federation(federation(tmp_path / "d").source["spec"]).fingerprint() == expected


def test_the_error_for_an_unknown_name_has_the_nearest_one_and_the_list():
    with pytest.raises(BadInput, match=r"No federation .digit-shft.; did you mean \"digits-shift\"\? .fednorms list"):
        federation("digit-shft")
    with pytest.raises(BadInput, match="`fednorms list federations` lists all names"):
        federation("zzz")
    with pytest.raises(BadInput, match="not a folder"):
        federation("folder:/no/such/place")


def test_settings_that_define_a_federation_are_refused_for_an_object(digits):
    with pytest.raises(BadInput, match="already exists: seed, size"):
        federation(digits, size=8, seed=1)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("digits-shift", {"size": "big"}, "size must be a positive number of pixels or .*, got 'big'"),
        ("digits-shift", {"size": True}, "size must be a positive number of pixels or .*, got True"),
        ("digits-shift", {"seed": "x", "val": "y"}, "seed must be a whole number, got 'x'"),
        ("pacs", {"root": 3}, "root must be a folder, got 3"),
        ("pacs", {"root": ".", "complete": "no"}, "complete must be True or False, got 'no'"),
        (3, {}, "Federation: expected a name or a path, got 3"),
    ],
)
def test_options_of_the_wrong_kind_are_bad_input(spec, options, said):
    with pytest.raises(BadInput, match=said):
        federation(spec, **options)


def test_a_folder_that_is_something_else_is_shown(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "photo").mkdir()
    said = r"does not hold this data set; expected .* The folder holds a\.png, photo/\. It is published at https:"
    with pytest.raises(BadInput, match=said):
        federation("pacs", root=tmp_path)
    for label in ("cat", "dog"):
        (tmp_path / "classes" / label).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "classes" / label / "0.png")
    with pytest.raises(BadInput, match="put them into the folder of their site"):
        federation(tmp_path / "classes")


def test_a_federation_remembers_its_name_and_settings_until_it_is_changed(digits):
    found = federation("digits-shift", size=8, seed=2)
    assert found.asked_for == ("digits-shift", {"size": 8, "seed": 2})
    assert federation(found).asked_for == found.asked_for
    others = [
        found.hold_out("faint"),
        found.without("faint"),
        found.pooled(),
        partition(found, "iid(clients=2)"),
        replace(found, preprocessing=Preprocessing()),
        digits,
    ]
    assert [made.asked_for for made in others] == [None] * len(others)


def test_a_federation_of_folders_remembers_what_a_recipe_can_say(tmp_path):
    for site in ("berlin", "oslo"):
        for label in ("cat", "dog"):
            (tmp_path / "pets" / site / label).mkdir(parents=True)
            for i in range(5):
                Image.new("RGB", (6 + i % 2, 4)).save(tmp_path / "pets" / site / label / f"p{i}.png")
    root, name = tmp_path / "pets", f"folder:{tmp_path / 'pets'}"
    options = {"size": 8, "channels": 1, "val": 0.0, "test": 0.4, "seed": 3, "group": r"(p\d)"}
    made = from_folders(root, **options)
    assert made.asked_for == (name, options)
    assert federation(name, **options).fingerprint() == made.fingerprint()
    assert from_folders(root, size=8).asked_for == (name, {"size": 8})
    assert from_folders(root, size=(8, 6)).asked_for == (name, {"size": (8, 6)})
    for extra in (
        {"size": 8, "classes": ["dog", "cat"]},
        {"size": 8, "name": "animals"},
        {"size": 8, "preprocessing": Preprocessing()},
        {"size": 8, "group": lambda path: path.name},
    ):
        assert from_folders(root, **extra).asked_for is None
    with pytest.raises(BadInput, match="the option channels is for folders"):
        federation("digits-shift", channels=1)
