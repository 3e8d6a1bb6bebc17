"""`fednorms.check` and `fednorms data check`: every finding on small folders of images."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import fednorms as fn
from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.data.check.images import seen_in
from fednorms.data.folders import look


def scene(path, seed, size=(40, 36), mode="RGB"):
    r = np.random.RandomState(seed)
    pixels = Image.fromarray(r.randint(0, 256, (6, 6, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels.convert(mode).save(path)
    return path


@pytest.fixture
def root(tmp_path):
    """Two sites, two classes, 20 images each, all different."""
    seed = 0
    for site in ("bern", "oslo"):
        for label in ("cat", "dog"):
            for i in range(20):
                scene(tmp_path / "data" / site / label / f"{i:03d}.png", seed)
                seed += 1
    return tmp_path / "data"


def checked(root, **options):
    return fn.check(root, cache=root.parent / "cache", **options)


def kinds(findings):
    return {finding.kind for finding in findings}


def files_of(found, kind):
    return next(finding.files for finding in (*found.must_fix, *found.should_know) if finding.kind == kind)


def test_sound_data_are_fine(root):
    found = checked(root)
    assert found.ok
    assert found.images == 80
    assert found.sizes == {(36, 40): 80}
    assert [(s.name, s.train, s.val, s.test, s.classes) for s in found.sites] == [
        ("bern", 28, 4, 8, (20, 20)),
        ("oslo", 28, 4, 8, (20, 20)),
    ]
    assert kinds(found.should_know) == {"rare classes", "small tests"}
    text = repr(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "Must fix\n  nothing" in text
    html = found._repr_html_()
    assert "<table>" in html
    assert "bern" in html
    json.dumps(found.to_dict())


def test_broken_and_empty_files_are_named_and_can_be_left_out(root, capsys):
    (root / "oslo" / "cat" / "001.png").write_bytes(b"")
    whole = (root / "bern" / "dog" / "002.png").read_bytes()
    (root / "bern" / "dog" / "002.png").write_bytes(whole[: len(whole) // 2])
    (root / "bern" / "dog" / "003.png").write_bytes(b"no image")
    found = checked(root)
    assert kinds(found.must_fix) == {"broken"}
    assert sorted(name.partition(":")[0] for name in files_of(found, "broken")) == [
        "bern/dog/002.png",
        "bern/dog/003.png",
        "oslo/cat/001.png",
    ]
    assert main(["data", "check", str(root)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "3 files cannot be read, 1 of them empty" in said
    assert "--skip-broken" in said
    assert main(["data", "check", str(root), "--skip-broken", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"] == 77
    assert len(report["left_out"]) == 3
    with pytest.raises(BadInput, match=r"002\.png"):
        fn.from_folders(root, cache=False)
    kept = fn.from_folders(root, cache=False, skip_broken=True)
    assert sum(len(split) for site in kept.sites for split in site.splits.values()) == 77
    assert sorted(name.partition(":")[0] for name in kept.source["left_out"]) == [
        "bern/dog/002.png",
        "bern/dog/003.png",
        "oslo/cat/001.png",
    ]


def test_a_run_records_the_files_that_it_left_out_and_resumes(root, tmp_path, capsys):
    (root / "oslo" / "cat" / "001.png").write_bytes(b"")
    run = ["run", "--federation", str(root), "--size", "8", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*run, "--rounds", "1"]) == 2
    assert main([*run, "--rounds", "1", "--skip-broken"]) == 0
    facts = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert facts["left_out"] == ["oslo/cat/001.png: the file is empty"]
    assert "skip_broken = true" in (tmp_path / "run" / "recipe.toml").read_text()
    assert main(["resume", str(tmp_path / "run"), "--rounds", "2", "--quiet"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    shutil.copytree(root / "oslo", tmp_path / "new")
    assert main(["adapt", str(tmp_path / "run"), str(tmp_path / "new")]) == 2
    assert "001.png" in capsys.readouterr().err
    assert main(["adapt", str(tmp_path / "run"), str(tmp_path / "new"), "--skip-broken"]) == 0
    assert "1 file that cannot be read is left out" in capsys.readouterr().out


def test_copies_in_training_and_test_data_must_be_fixed(root):
    splits = {name: part for name, part in _parts(root)}
    test = next(name for name, part in splits.items() if part == "test" and name.startswith("bern"))
    train = next(name for name, part in splits.items() if part == "train" and name.startswith("oslo"))
    shutil.copy(root / test, root / train)
    label = test.split("/")[1]
    found = checked(root)
    expected = {"copies"} if train.split("/")[1] == label else {"copies", "two labels"}
    assert kinds(found.must_fix) == expected
    assert files_of(found, "copies") == (test,)
    (shared,) = [f for f in found.should_know if f.kind == "copies at sites"]
    assert test in shared.text
    assert train in shared.text
    dropped = checked(root, copies="drop") if expected == {"copies"} else None
    assert dropped is None or dropped.ok


def _parts(root):
    from fednorms.data.check.images import seen_in
    from fednorms.data.folders import counted_only

    with counted_only():
        made = fn.from_folders(root, size=8)
    return [(image.name, image.part) for image in seen_in(made, False)]


def test_equal_images_with_two_labels_must_be_fixed(root):
    shutil.copy(root / "bern" / "cat" / "000.png", root / "bern" / "dog" / "000.png")
    found = checked(root)
    assert "two labels" in kinds(found.must_fix)
    (pair,) = files_of(found, "two labels")
    assert set(pair.split(" = ")) == {"bern/cat/000.png", "bern/dog/000.png"}


def test_copies_together_are_in_one_split_over_all_sites(root):
    for i in range(8):
        shutil.copy(root / "bern" / "cat" / f"{i:03d}.png", root / "oslo" / "cat" / f"{i:03d}.png")
    assert "copies" in kinds(checked(root).must_fix)
    assert checked(root, copies="together").ok


@pytest.mark.parametrize("across", [False, True])
def test_ids_that_the_split_divides_must_be_fixed_and_the_pattern_does_it(tmp_path, across):
    root = tmp_path / "data"
    for seed, (site, label, i) in enumerate((s, c, i) for s in ("bern", "oslo") for c in ("a", "b") for i in range(24)):
        scene(root / site / label / f"patient{'ab'.index(label)}{i // 4:02d}_{i}.png", seed)
    found = checked(root)
    (finding,) = [f for f in found.must_fix if f.kind == "ids"]
    assert "group=" in finding.text
    pattern = finding.text.split('group="')[1].split('"')[0]
    fixed = checked(root, group=pattern, group_across=across or None)
    assert fixed.ok
    homes = {}
    for name, part in _parts_of_group(root, pattern, across):
        whose = name.rpartition("/")[2].split("_")[0]
        key = whose if across else (name.split("/")[0], whose)
        homes.setdefault(key, set()).add(part)
    assert all(len(parts) == 1 for parts in homes.values())


def _parts_of_group(root, pattern, across):
    from fednorms.data.check.images import seen_in
    from fednorms.data.folders import counted_only

    with counted_only():
        made = fn.from_folders(root, size=8, group=pattern, group_across=across)
    return [(image.name, image.part) for image in seen_in(made, False)]


def test_a_split_of_the_folders_is_not_said_to_be_changed_by_options(tmp_path):
    root = tmp_path / "data"
    for seed, (part, label, i) in enumerate(
        (p, c, i) for p in ("train", "test") for c in ("a", "b") for i in range(24)
    ):
        scene(root / "bern" / part / label / f"patient{'ab'.index(label)}{i // 4:02d}_{i}.png", seed)
    shutil.copy(root / "bern/train/a/patient000_0.png", root / "bern/test/a/patient000_0.png")
    must = {finding.kind: finding.text for finding in checked(root).must_fix}
    assert set(must) == {"ids", "copies"}
    assert not any(option in text for text in must.values() for option in ("group=", "together"))
    assert "Move the images of each id" in must["ids"]


def test_missing_and_single_classes_and_no_tests(root, tmp_path):
    shutil.rmtree(root / "oslo" / "dog")
    found = checked(root)
    assert files_of(found, "missing classes") == ("oslo: dog",)
    shutil.rmtree(root / "bern" / "dog")
    assert kinds(checked(root).must_fix) == {"one class"}
    assert "no tests" in kinds(checked(root, test=0.0).must_fix)
    assert "no validation" in kinds(checked(root, val=0.0).should_know)


def test_a_class_that_is_only_tested(tmp_path):
    for seed, (part, label) in enumerate([("train", "a"), ("train", "a"), ("test", "a"), ("test", "b")]):
        scene(tmp_path / "data" / "oslo" / part / label / f"{seed}.png", seed)
    assert "untrained class" in kinds(checked(tmp_path / "data").must_fix)


def test_five_images(tmp_path):
    for i in range(5):
        scene(tmp_path / "data" / "oslo" / "ab"[i % 2] / f"{i}.png", i)
    found = checked(tmp_path / "data")
    assert "small tests" in kinds(found.should_know)
    assert found.sites[0].test_interval[1] - found.sites[0].test_interval[0] > 0.4


def test_sizes_and_gray_sites_are_told(root):
    scene(root / "oslo" / "dog" / "000.png", 999, (20, 30))
    for path in (root / "bern").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    found = checked(root)
    assert {"sizes", "modes"} <= kinds(found.should_know)
    assert found.modes == {"L": 40, "RGB": 40}


def test_a_second_check_opens_nothing_but_what_changed(root, monkeypatch):
    first = checked(root)
    opened = []
    monkeypatch.setattr(look, "look_at_file", lambda path: opened.append(path) or look.Look("changed"))
    assert checked(root).to_dict() == first.to_dict()
    assert opened == []
    scene(root / "oslo" / "dog" / "004.png", 1234)
    assert files_of(checked(root), "broken") == ("oslo/dog/004.png: changed",)
    assert [path.name for path in opened] == ["004.png"]


def test_an_interrupted_check_keeps_what_it_saw(root, monkeypatch):
    original, seen = look.look_at_file, []

    def interrupted(path):
        if len(seen) == 30:
            raise KeyboardInterrupt
        seen.append(path)
        return original(path)

    monkeypatch.setattr(look, "look_at_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checked(root)
    before = len(seen)
    monkeypatch.setattr(look, "look_at_file", lambda path: seen.append(path) or original(path))
    assert checked(root).ok
    assert 80 <= len(seen) < 80 + before


def test_a_damaged_cache_is_not_used(root):
    first = checked(root)
    for path in (root.parent / "cache").glob("*.looks.json"):
        path.write_text('{"format": 1, "files": {"x": []}}')
    assert checked(root).to_dict() == first.to_dict()


def test_packs_arrays_and_names(root, tmp_path):
    made = fn.from_folders(root, cache=False)
    assert fn.check(made).images == 80
    from fednorms.data.pack import pack

    pack(made, tmp_path / "d.fnpack")
    found = fn.check(tmp_path / "d.fnpack")
    assert found.ok
    assert [s.classes for s in found.sites] == [(20, 20), (20, 20)]
    assert fn.check("digits-shift").ok


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--group", "("], "not a regular expression"),
        (["--group", "(patient[0-9]+)"], "matches nothing in 80 of 80 file names"),
        (["--group-across"], "no group is given"),
        (["--protocol", "fedwon"], "has no protocols"),
        (["--test", "0.9", "--val", "0.2"], "fractions that leave images to train on"),
        (["--copies", "lose"], "drop"),
    ],
)
def test_bad_calls(root, capsys, options, said):
    assert main(["data", "check", str(root), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "not a folder of images" not in error  # the folder is fine, the option is not
    assert options[0] in error or "protocol" in said


def test_a_class_without_test_images_is_named(root):
    for path in (root / "oslo").rglob("*.png"):
        path.unlink()
    shutil.rmtree(root / "oslo")
    for path in sorted((root / "bern" / "dog").iterdir())[1:]:
        path.unlink()
    found = checked(root)
    rare = next(finding.text for finding in found.should_know if finding.kind == "rare classes")
    assert all(image.label != 1 for image in seen_in(fn.from_folders(root, cache=False), False) if image.part == "test")
    assert '"cat", "dog"' in rare
    assert "the fewest: 0" in rare


def test_sites_in_nested_folders_are_said_to_be_in_the_innermost(root, tmp_path):
    (tmp_path / "archive").mkdir()
    shutil.move(root, tmp_path / "archive" / "images of sites")
    notes = [f.text for f in checked(tmp_path).should_know if f.kind == "note"]
    assert notes == ['The sites are the folders inside "archive/images of sites": bern, oslo.']
