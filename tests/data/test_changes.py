"""Options that fit every federation: subset, copies, validation share, normalization, and sizes of two numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.readers import pacs_vlcs
from fednorms.runs.session import open_federation
from tests.support.layouts import class_folders, first_values, sizes


def test_a_subset_is_stratified_nested_and_repeats():
    whole = fn.federation("digits-shift")
    small, large = (fn.federation("digits-shift", subset=share) for share in (0.1, 0.3))
    for site in whole.sites:
        for part, split in site.splits.items():
            kept = small.site(site.name).splits[part]
            counts = np.bincount(split.y, minlength=10)
            mine = np.bincount(kept.y, minlength=10)
            assert (mine >= 1).all()
            assert (np.abs(mine - 0.1 * counts) <= 1.5).all()
            rows = {image.numpy().tobytes() for image in large.site(site.name).splits[part].x}
            inside = sum(image.numpy().tobytes() in rows for image in kept.x)
            assert inside >= len(kept) - 10
    again = fn.federation("digits-shift", subset=0.1)
    assert again.fingerprint() == small.fingerprint() != fn.federation("digits-shift", subset=0.1, seed=1).fingerprint()
    assert "only 10 % of the images are used" in small.source["notes"]
    assert fn.federation("digits-shift", subset=1.0).fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("share", [0, -0.1, 1.2])
def test_a_subset_must_be_a_fraction(share):
    with pytest.raises(BadInput, match="fraction"):
        fn.federation("digits-shift", subset=float(share))


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("half", (0.5,) * 3, (0.5,) * 3),
        ("none", None, None),
        ("0.1/0.2", (0.1,), (0.2,)),
        ("0.1,0.2,0.3/0.5", (0.1, 0.2, 0.3), (0.5,) * 3),
    ],
)
def test_normalization_by_name_and_in_numbers(text, mean, std):
    recipe = fn.Recipe(data={"normalize": text})
    assert fn.Recipe.from_toml(recipe.to_toml()) == recipe
    found = open_federation(recipe).preprocessing
    assert (found.mean, found.std) == (mean, std)
    x = torch.rand(2, 3, 4, 4)
    expected = x if mean is None else (x - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    torch.testing.assert_close(found(x), expected)


@pytest.mark.parametrize("text", ["imagenette", "0.5", "a/b", "0.5/0", "0.1,0.2/0.1,0.2,0.3"])
def test_a_normalization_that_is_not_known(text):
    with pytest.raises(BadInput, match=r"[Nn]ormalization|Preprocessing"):
        fn.federation("digits-shift", normalize=text)


def test_a_validation_share_where_a_protocol_has_none(tmp_path):
    root = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 10)
    options = {"root": root, "size": 6, "complete": False}
    plain = fn.federation("pacs", **options)
    shared = fn.federation("pacs", val=0.2, **options)
    assert "val" not in sizes(plain)["photo"]
    for one, two in zip(plain.sites, shared.sites, strict=True):
        both = first_values(two.train) + first_values(two.val)
        assert sorted(both) == sorted(first_values(one.train))
        assert len(two.val) == round(0.2 * len(one.train))
        assert first_values(one.test) == first_values(two.test)
    with pytest.raises(BadInput, match="has validation images of its own"):
        fn.federation("pacs", protocol="greg", val=0.2, **options)
    assert any("which is not the protocol's" in note for note in shared.source["notes"])


def test_dropping_copies_keeps_the_test_image():
    x = np.arange(8, dtype=np.uint8).reshape(8, 1, 1)
    made = fn.from_arrays(
        {
            "a": {"train": (x[[0, 1, 2, 2]], [0, 1, 0, 0]), "test": (x[[1, 5]], [1, 0])},
            "b": {"train": (x[[2, 5, 6, 7]], [0, 1, 1, 0]), "test": (x[[3]], [1])},
        },
        classes=["0", "1"],
    )
    from fednorms.data.duplicates import duplicates, without_copies

    left = without_copies(made)
    kept = {site.name: {part: s.x.flatten().tolist() for part, s in site.splits.items()} for site in left.sites}
    # 1 is tested; 2 is trained three times; 5 has two labels.
    assert kept == {"a": {"train": [0, 2], "test": [1]}, "b": {"train": [6, 7], "test": [3]}}
    assert left.source["copies_dropped"] == 5
    assert duplicates(left) == []
    assert without_copies(left) is left
    with pytest.raises(BadInput, match="copies"):
        fn.federation("digits-shift", copies="together")


def test_height_and_width(tmp_path):
    root = class_folders(tmp_path / "mine", ("oslo", "bern"), ("cat", "dog"), 10)
    by_text, by_pair = (fn.federation(root, size=size) for size in ("7x9", (7, 9)))
    assert by_text.shape == by_pair.shape == (3, 7, 9)
    assert by_text.fingerprint() == by_pair.fingerprint()
    for size, written in (("7x9", "7x9"), ((7, 9), "7x9"), ("8", 8), ("8x8", 8), (8, 8)):
        recipe = fn.Recipe(federation=str(root), data={"size": size})
        assert recipe.data.size == written
        assert fn.Recipe.from_toml(recipe.to_toml()) == recipe
    pacs = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 4)
    assert fn.federation("pacs", root=pacs, size="6x4", complete=False).shape == (3, 6, 4)
    with pytest.raises(BadInput, match="square images"):
        fn.federation("digits-shift", size="8x9")
    for wrong in ("8x", "x", "0x4", "-3", "8x9x3"):
        with pytest.raises(BadInput, match="size must be"):
            fn.Recipe.make({"data": {"size": wrong}})


def test_a_run_on_images_that_are_not_square_is_exported_and_used(tmp_path):
    root = class_folders(tmp_path / "mine", ("oslo", "bern"), ("cat", "dog"), 10)
    result = fn.run("fedavg", fn.federation(root, size="16x24"), rounds=1, out=tmp_path / "run")
    assert result.recipe.data.size == "16x24"
    fn.export(tmp_path / "run", tmp_path / "model")
    loaded = fn.load_model(tmp_path / "model")
    assert loaded is not None
    labels = fn.predict(tmp_path / "model", [root / "oslo" / "cat"])
    assert labels is not None
    assert Preprocessing.centered(3) == open_federation(result.recipe).preprocessing
