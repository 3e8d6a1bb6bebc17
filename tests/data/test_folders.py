"""Federations from folders of images: layouts, splits, the cache, and what is refused."""

from __future__ import annotations

import os
import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.data import MappedImages, from_folders, site_from_folder


def picture(path: Path, value=0, size=(6, 5), mode="RGB"):
    """Save an image whose pixels all have this value; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.full((size[1], size[0], bands), value, dtype=np.uint8)
    pixels[0, 0] = 255 - value
    Image.fromarray(pixels.squeeze()).save(path)


@pytest.fixture
def root(tmp_path):
    """Two sites: one has two classes, the other a third one as well; each image has its own gray value."""
    value = 0
    for site, labels in (("oslo", ("dog", "cat")), ("bonn", ("cat", "cow", "dog"))):
        for label in labels:
            for i in range(10):
                picture(tmp_path / "data" / site / label / f"p{i // 2}-{i}.png", value)
                value += 1
    return tmp_path / "data"


def load(root, **options):
    return from_folders(root, **{"cache": root.parent / "cache", **options})


def values(split):
    return split.x[:][:, 0, 1, 1].tolist()


def test_sites_classes_images_and_labels(root):
    fed = load(root)
    assert [s.name for s in fed.sites] == ["bonn", "oslo"]
    assert fed.classes == ("cat", "cow", "dog")
    assert fed.shape == (3, 5, 6)
    assert fed.name == "data"
    bonn, oslo = fed.sites
    assert {p: len(s) for p, s in bonn.splits.items()} == {"train": 21, "val": 3, "test": 6}
    assert sorted(v for s in bonn.splits.values() for v in values(s)) == list(range(20, 50))
    assert sorted(v for s in oslo.splits.values() for v in values(s)) == list(range(20))
    for site in fed.sites:
        for split in site.splits.values():
            for value, label in zip(values(split), split.y.tolist(), strict=True):
                assert fed.classes[label] == ["dog", "cat", "cat", "cow", "dog"][value // 10]
            assert (split.x[:][:, :, 0, 0] + split.x[:][:, :, 1, 1] == 255).all(), "rows and columns are in place"


def test_the_order_of_files_on_disk_does_not_matter(root, tmp_path):
    paths = sorted(root.rglob("*.png"), reverse=True)
    for path in paths:
        target = tmp_path / "copy" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert load(root).fingerprint() == load(tmp_path / "copy").fingerprint() == load(root).fingerprint()
    assert load(root).fingerprint() != load(root, seed=1).fingerprint()


def test_size_resizes_as_pillow_does(root):
    fed = load(root, size=8, val=0, test=0)
    assert fed.shape == (3, 8, 8)
    first = Image.open(root / "bonn" / "cat" / "p0-0.png").resize((8, 8), Image.Resampling.BILINEAR)
    assert torch.equal(fed.site("bonn").train.x[0], torch.from_numpy(np.array(first)).permute(2, 0, 1))
    assert load(root, size=(4, 7)).shape == (3, 4, 7)


def test_size_brings_different_images_together(root):
    picture(root / "oslo" / "cat" / "large.png", 7, (20, 10))
    assert load(root, size=8).shape == (3, 8, 8)
    with pytest.raises(BadInput) as caught:
        load(root)
    message = str(caught.value)
    assert 'p0-0.png" is 5x6 (height x width)' in message
    assert 'large.png" is 10x20' in message
    assert "with size=5" in message


def test_explicit_splits_are_taken_as_they_are(tmp_path):
    for part, n in (("train", 4), ("test", 2)):
        for i in range(n):
            picture(tmp_path / "d" / "a" / part / "cat" / f"{i}.png", i)
    picture(tmp_path / "d" / "u" / "test" / "dog" / "0.png")
    for i in range(10):
        picture(tmp_path / "d" / "b" / "dog" / f"{i}.png")
    fed = load(tmp_path / "d", cache=tmp_path / "c")
    assert {s.name: {p: len(v) for p, v in s.splits.items()} for s in fed.sites} == {
        "a": {"train": 4, "test": 2},
        "b": {"train": 7, "val": 1, "test": 2},
        "u": {"test": 1},
    }
    assert fed.classes == ("cat", "dog")


def test_a_class_may_be_called_test(tmp_path):
    for label in ("train", "test"):
        picture(tmp_path / "d" / "a" / label / "0.png")
    assert load(tmp_path / "d").classes == ("test", "train")


@pytest.mark.parametrize("group", [r"(p\d+)-", r"^p\d+", lambda path: path.name.split("-")[0]])
def test_no_patient_is_in_two_splits(root, group):
    fed = load(root, group=group, val=0.2, test=0.2)
    for site in fed.sites:
        homes = [{v % 10 // 2 for v in values(split)} for split in site.splits.values()]
        assert len(homes) == 3
        assert sum(map(len, homes)) == 5


@pytest.mark.parametrize("group", [None, r"(p\d+)-"])
def test_test_images_do_not_depend_on_the_fraction_for_validation(root, group):
    tested = [
        [values(s.test) for s in load(root, val=val, test=0.3, group=group).sites] for val in (0.0, 0.1, 0.25, 0.5)
    ]
    assert tested[0] == tested[1] == tested[2] == tested[3]
    for site in load(root, val=0.35, test=0.3).sites:
        assert sorted(v for split in site.splits.values() for v in values(split)) == sorted(
            {v for split in site.splits.values() for v in values(split)}
        )
        assert len(site.val) == pytest.approx(0.35 * sum(map(len, site.splits.values())), abs=1)


def test_a_pattern_that_does_not_distinguish_patients_is_refused(root):
    with pytest.raises(BadInput, match="group makes 1 group, too few"):
        load(root, group=r"^(p)")


def test_stacks_of_slices_and_pixels_out_of_range_are_refused_by_name(tmp_path):
    for name, label in (("stack", "x"), ("signed", "y")):
        picture(tmp_path / name / "a" / label / "0.png")
    pages = [Image.fromarray(np.full((6, 6), v, dtype=np.uint8)) for v in (1, 2, 3)]
    pages[0].save(tmp_path / "stack" / "a" / "x" / "1.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(BadInput, match=r"1.tif. cannot be read: it has 3 pages"):
        load(tmp_path / "stack", size=4)
    Image.fromarray(np.array([[-1000, 2000]] * 2, dtype=np.int32)).save(tmp_path / "signed" / "a" / "y" / "1.tif")
    with pytest.raises(BadInput, match="pixels of -1000 to 2000; expected 0 to 65535"):
        load(tmp_path / "signed", size=4)


def test_images_with_twelve_of_sixteen_bits_are_noted(tmp_path):
    for i, high in enumerate((4095, 300)):
        pixels = np.linspace(0, high, 36).reshape(6, 6).astype(np.uint16)
        (tmp_path / "d" / "a" / "x").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "d" / "a" / "x" / f"{i}.png")
    with pytest.warns(UserWarning, match="2 16-bit images have no pixel above 4095"):
        load(tmp_path / "d", val=0, test=0)


def test_classes_that_differ_only_in_encoding_are_one_and_noted(tmp_path):
    for site, label in (("a", "m\u00fcde"), ("b", "mu\u0308de")):
        picture(tmp_path / "d" / site / label / "0.png")
    (note,) = load(tmp_path / "d").source["notes"]
    assert "encoding" in note


def test_a_changed_file_with_the_same_time_is_noticed(tmp_path):
    path = tmp_path / "d" / "oslo" / "dog" / "0.bmp"  # the same size for any content
    picture(path, 10)
    picture(path.with_name("1.bmp"), 20)
    before, found = load(tmp_path / "d", val=0, test=0).fingerprint(), path.stat()
    picture(path, 250)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert load(tmp_path / "d", val=0, test=0).fingerprint() != before


def test_refuses_a_patient_in_two_given_splits_and_patterns_that_do_not_match(root, tmp_path):
    picture(tmp_path / "d" / "a" / "train" / "cat" / "p1-0.png")
    picture(tmp_path / "d" / "a" / "test" / "cat" / "p1-1.png")
    with pytest.raises(BadInput, match=r"group .p1. is in both"):
        load(tmp_path / "d", group=r"(p\d+)")
    with pytest.raises(BadInput, match=r"matches nothing in 50 of 50 file names.*p0-0.png"):
        load(root, group=r"(q\d+)")
    with pytest.raises(BadInput, match="not a regular expression"):
        load(root, group="(")


def test_hidden_files_and_other_files_are_ignored(root):
    expected = load(root).fingerprint()
    (root / ".git" / "x").mkdir(parents=True)
    (root / "README.txt").write_text("about")
    (root / "oslo" / ".thumbs").mkdir()
    (root / "oslo" / "cat" / ".hidden.png").write_bytes(b"no image")
    (root / "oslo" / "cat" / "notes.txt").write_text("about")
    (root / "__MACOSX" / "oslo").mkdir(parents=True)
    assert load(root).fingerprint() == expected


@pytest.mark.parametrize("extension", ["png", "jpg", "jpeg", "bmp", "tif", "tiff", "webp", "gif", "PNG"])
def test_file_types(tmp_path, extension):
    path = tmp_path / "d" / "a" / "cat" / f"0.{extension}"
    path.parent.mkdir(parents=True)
    Image.new("RGB", (16, 16), (200, 200, 200)).save(path)
    x = load(tmp_path / "d").sites[0].train.x
    assert x.shape == (1, 3, 16, 16)
    assert (x.int() - 200).abs().max() <= 3


def test_modes_are_converted(tmp_path):
    folder = tmp_path / "d" / "a" / "cat"
    folder.mkdir(parents=True)
    Image.new("L", (4, 4), 100).save(folder / "0.png")
    Image.new("RGBA", (4, 4), (100, 100, 100, 7)).save(folder / "1.png")
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 100, 100, 100])
    palette.save(folder / "2.png", transparency=b"\x00\x10")
    Image.fromarray(np.full((4, 4), 100 * 257, dtype=np.uint16)).save(folder / "3.png")
    frames = [Image.new("L", (4, 4), value) for value in (100, 200)]
    frames[0].save(folder / "4.gif", save_all=True, append_images=frames[1:])
    Image.new("1", (4, 4), 1).save(folder / "5.png")
    for channels in (1, 3, 4):
        x = load(tmp_path / "d", channels=channels, val=0, test=0).sites[0].train.x
        assert x.shape == (6, channels, 4, 4)
        assert x[:5, 0].unique().tolist() == [100]
        assert x[5, 0].unique().tolist() == [255]


def counted(monkeypatch):
    opened = []
    lock = threading.Lock()
    original = Image.open

    def count(path, *args, **kwargs):
        with lock:
            opened.append(path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Image, "open", count)
    return opened


def test_images_are_decoded_once(root, monkeypatch):
    opened = counted(monkeypatch)
    first = load(root, size=8)
    assert len(opened) == 50
    assert load(root, size=8, seed=3).fingerprint() != first.fingerprint()
    assert load(root, size=8).fingerprint() == first.fingerprint()
    assert len(opened) == 50, "the second and third time nothing is opened"
    load(root, size=4)
    assert len(opened) == 100, "another size is another cache"


def test_a_changed_or_new_file_is_noticed(root):
    before = load(root)
    path = root / "oslo" / "cat" / "p0-0.png"
    picture(path, 99)
    os.utime(path, ns=(1, 1))
    changed = load(root)
    assert changed.fingerprint() != before.fingerprint()
    picture(root / "oslo" / "cat" / "q.png", 98)
    assert sum(len(s) for s in load(root).site("oslo").splits.values()) == 21


def test_a_broken_cache_file_is_made_again(root):
    expected = load(root).fingerprint()
    (cached,) = (root.parent / "cache").glob("*.npy")
    for content in (b"", b"rubbish", cached.read_bytes()[:-5]):
        cached.write_bytes(content)
        assert load(root).fingerprint() == expected
    assert [p.suffix for p in (root.parent / "cache").iterdir() if p.suffix != ".json"] == [".npy"], (
        "nothing else is left behind"
    )


@pytest.mark.parametrize("limit", [2**30, 100])
def test_no_flipped_bit_of_the_cache_reaches_the_images(root, limit):
    expected = load(root, size=8, memory_limit=limit).fingerprint()
    (cached,) = (root.parent / "cache").glob("*.npy")
    whole, draw, removed = cached.read_bytes(), random.Random(0), 0
    for _ in range(20):
        at = draw.randrange(len(whole))
        cached.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        try:
            found = load(root, size=8, memory_limit=limit).fingerprint()
        except BadInput as error:  # found only when a batch was read
            removed += "is damaged (its content hash differs) and was removed" in str(error)
            assert not cached.exists()
            found = load(root, size=8, memory_limit=limit).fingerprint()
        assert found == expected
    assert (removed > 0) == (limit == 100)


def test_a_cache_of_version_0_1_has_no_hashes_and_is_made_again(root, monkeypatch):
    expected = load(root, size=8).fingerprint()
    (cached,) = (root.parent / "cache").glob("*.npy")
    np.save(cached, np.load(cached))
    opened = counted(monkeypatch)
    assert load(root, size=8).fingerprint() == expected
    assert len(opened) == 50
    assert load(root, size=8).fingerprint() == expected
    assert len(opened) == 50


def test_images_on_disk_are_checked_in_a_worker_too(root):
    lazy = load(root, size=8, memory_limit=100).site("oslo").train.x
    again = pickle.loads(pickle.dumps(lazy))
    assert torch.equal(again[:], lazy[:])
    with lazy.path.open("r+b") as file:
        file.seek(200)
        file.write(b"\0\1\2")
    with pytest.raises(BadInput, match="is damaged"):
        pickle.loads(pickle.dumps(lazy))[:]


def test_leftovers_of_a_killed_process_are_removed(root):
    cache = root.parent / "cache"
    cache.mkdir()
    (cache / "old.partial").write_bytes(b"x")
    os.utime(cache / "old.partial", (1, 1))
    (cache / "young.partial").write_bytes(b"x")
    load(root)
    assert sorted(p.name for p in cache.glob("*.partial")) == ["young.partial"]


def test_the_default_cache_is_the_users(root, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load(root, cache=None)
    assert len(list((tmp_path / "xdg" / "fednorms").glob("*.npy"))) == 1


def test_beyond_the_memory_limit_images_stay_on_disk_and_are_the_same(root):
    plain, lazy = load(root, size=8), load(root, size=8, memory_limit=100)
    assert isinstance(plain.site("oslo").train.x, torch.Tensor)
    assert isinstance(lazy.site("oslo").train.x, MappedImages)
    assert plain.fingerprint() == lazy.fingerprint()
    for site in plain.sites:
        for part, split in site.splits.items():
            x, y = lazy.site(site.name).splits[part].batch(range(len(split))[::-1])
            assert torch.equal(x, split.x.flip(0))
            assert torch.equal(y, split.y.flip(0))
    assert lazy.pooled().fingerprint() == plain.pooled().fingerprint()
    assert lazy.hold_out("oslo").fingerprint() == plain.hold_out("oslo").fingerprint()


def test_without_a_place_for_the_cache(root, tmp_path):
    expected = load(root).fingerprint()
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match="annot write the cache"):
        assert load(root, cache=blocked).fingerprint() == expected
    with pytest.raises(BadInput, match="annot write the cache"):
        load(root, cache=blocked, memory_limit=100)
    assert load(root, cache=False).fingerprint() == expected
    with pytest.raises(BadInput, match="needs a cache"):
        load(root, cache=False, memory_limit=100)


def test_a_full_disk_leaves_nothing_behind(root, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert len(load(root).sites) == 2
    assert not list((root.parent / "cache").iterdir())


def test_refuses_unreadable_images_by_name(root):
    for i in range(13):
        (root / "bonn" / "cow" / f"p9-bad{i:02}.png").write_bytes(b"this is no image")
    (root / "bonn" / "cow" / "p9-bad00.png").write_bytes(b"")
    good = (root / "oslo" / "cat" / "p0-0.png").read_bytes()
    (root / "bonn" / "cat" / "p0-0.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(BadInput) as caught:
        load(root)
    message = str(caught.value)
    assert str(root / "bonn" / "cat" / "p0-0.png") in message
    assert 'p9-bad00.png" cannot be read: the file is empty' in message
    assert "and 4 more that cannot be read. Replace or remove them, or leave them out with skip_broken=True." in message
    assert not list((root.parent / "cache").iterdir())


def test_refuses_when_nothing_can_be_read_and_floating_point_pixels(tmp_path):
    folder = tmp_path / "d" / "a" / "cat"
    folder.mkdir(parents=True)
    (folder / "0.png").write_bytes(b"")
    with pytest.raises(BadInput, match=r"None of the 1 images can be read.*0\.png"):
        load(tmp_path / "d")
    (folder / "0.png").unlink()
    Image.fromarray(np.zeros((4, 4), dtype=np.float32)).save(folder / "0.tif")
    with pytest.raises(BadInput, match="floating-point pixels"):
        load(tmp_path / "d")


def test_refuses_folders_of_another_layout(tmp_path):
    with pytest.raises(BadInput, match="not a folder"):
        load(tmp_path / "missing")
    root = tmp_path / "d"
    root.mkdir()
    with pytest.raises(BadInput, match="no site folders"):
        load(root)
    picture(root / "flat" / "0.png")
    (root / "empty").mkdir()
    (root / "bare" / "cat").mkdir(parents=True)
    picture(root / "deep" / "cat" / "more" / "0.png")
    picture(root / "good" / "cat" / "0.png")
    with pytest.raises(BadInput) as caught:
        load(root)
    message = str(caught.value)
    assert "4 problems" in message
    assert 'flat" has no class folders but 1 images' in message
    assert 'empty" has no class folders;' in message
    assert 'site "bare" has no images' in message
    assert "instead of images" in message


@pytest.mark.parametrize(
    "options",
    [{"size": 0}, {"size": (4, -1)}, {"channels": 2}, {"val": -0.1}, {"test": 1.0}, {"memory_limit": -1}],
)
def test_refuses_options_out_of_range(root, options):
    with pytest.raises(BadInput, match=f"from_folders: .*{next(iter(options))}"):
        load(root, **options)


def test_given_classes_keep_their_order(root):
    fed = load(root, classes=["dog", "cow", "cat", "emu"])
    assert fed.classes == ("dog", "cow", "cat", "emu")
    oslo = fed.site("oslo").train
    assert [fed.classes[label] for label in oslo.y.tolist()] == [["dog", "cat"][v // 10] for v in values(oslo)]
    with pytest.raises(BadInput, match="class folders cow are not among"):
        load(root, classes=["dog", "cat"])


def test_one_new_site_with_the_classes_of_a_federation(root):
    site = site_from_folder(root / "oslo", ["cat", "cow", "dog"], cache=root.parent / "c")
    assert (site.name, site.domain, len(site.train)) == ("oslo", "oslo", 20)
    assert sorted(values(site.train)) == list(range(20))
    assert site.train.y.unique().tolist() == [0, 2]
    halves = site_from_folder(root / "oslo", ["cat", "cow", "dog"], test=0.5, cache=root.parent / "c")
    assert (len(halves.train), len(halves.test)) == (10, 10)
    with pytest.raises(BadInput, match="not among"):
        site_from_folder(root / "bonn", ["cat", "dog"])
    with pytest.raises(BadInput, match="not a folder"):
        site_from_folder(root / "rome", ["cat", "dog"])
