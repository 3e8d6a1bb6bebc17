"""Data sets described by tables: Camelyon17, Fairface, Fed-ISIC2019 and a table of centers."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.data import Protocol
from fednorms.data.folders import counted_only
from fednorms.data.folders.preparations import lesion, shades_of_gray
from fednorms.data.readers import camelyon17, centers, fairface, isic
from fednorms.data.registry import federation
from tests.support import data_sets
from tests.support.layouts import first_values, picture, sizes, table


def test_camelyon17(tmp_path):
    rows = []
    for centre in range(5):
        for i in range(200):
            patient = f"{centre * 20 + i % 5:03d}"
            rows.append(
                {"": len(rows), "patient": patient, "node": i % 3, "x_coord": i, "y_coord": 2 * i, "tumor": i % 2,
                 "slide": 0, "center": centre, "split": 0}
            )  # fmt: skip
    table(tmp_path / "camelyon17_v1.0" / "metadata.csv", rows)
    (tmp_path / "camelyon17_v1.0" / "patches").mkdir()
    with pytest.raises(BadInput, match="center0: 4 of 4 listed images missing"):
        camelyon17.camelyon17(tmp_path, complete=False, size=4, cache=False)
    for value, row in enumerate(rows):
        name = f"patient_{row['patient']}_node_{row['node']}"
        patch = f"patch_{name}_x_{row['x_coord']}_y_{row['y_coord']}.png"
        picture(tmp_path / "camelyon17_v1.0" / "patches" / name / patch, value)
    fed = federation("camelyon17", root=tmp_path, complete=False, size=4)
    # n = ceil(0.03 * 200) = 6, test 2, pool 4, train and val int(1.6) = 1.
    assert all(parts == {"train": 1, "val": 1, "test": 2} for parts in sizes(fed).values())
    for i, site in enumerate(fed.sites):
        values = [v for s in site.splits.values() for v in first_values(s)]
        assert all(v // 200 == i for v in values)
        assert [v % 2 for v in first_values(site.test)] == site.test.y.tolist()
    with pytest.raises(BadInput, match=r"metadata\.csv: 59,236 of 59,436 images of center0 missing"):
        camelyon17.camelyon17(tmp_path)
    full = camelyon17.camelyon17(tmp_path, "full", complete=False, size=4, cache=False)
    assert (fed.protocol.augment, full.protocol.augment) == ("flip_rotate", "none")
    for site in full.sites:
        patients = {part: {rows[v]["patient"] for v in first_values(s)} for part, s in site.splits.items()}
        assert not patients["train"] & patients["test"]
        assert not patients["val"] & patients["test"]


def test_fairface(tmp_path):
    data_sets.fairface(tmp_path)
    fed = federation("fairface", root=tmp_path, complete=False, size=4)
    assert fed.classes == ("Female", "Male")
    assert fed.protocol.augment == "fairface"
    assert sizes(fed) == {race: {"train": 10, "test": 2} for race in fairface.RACES}
    assert fed.site("Black").train.y.tolist() == [1, 0] * 5
    with pytest.raises(BadInput, match="86,674 of 86,744 images of train missing"):
        fairface.fairface(tmp_path)


def test_fed_isic2019(tmp_path):
    rows = [
        {"image": f"ISIC_{i:04d}", "target": i % 8, "center": i % 6, "fold": "test" if i % 5 == 0 else "train"}
        for i in range(120)
    ]
    table(tmp_path / "train_test_split", rows)
    for i in range(120):
        picture(tmp_path / "ISIC_2019_Training_Input" / f"ISIC_{i:04d}.jpg", 50 + i, (60, 40))
    fed = isic.fed_isic2019(tmp_path, complete=False, size=20, cache=False)
    assert [s.name for s in fed.sites] == list(isic.CENTERS)
    assert all(parts == {"train": 16, "test": 4} for parts in sizes(fed).values())
    assert (fed.shape, fed.stored_shape) == ((3, 20, 20), (3, 22, 22)), "a network sees 200 of 224 pixels"
    assert fed.protocol == Protocol("isic", "focal", isic.WEIGHTS, "balanced_accuracy")
    assert fed.site("MSK").train.y.tolist() == [r["target"] for r in rows if r["center"] == 4 and r["fold"] == "train"]
    for row in rows:
        del row["fold"]
    table(tmp_path / "train_test_split", rows)
    drawn = isic.fed_isic2019(tmp_path, complete=False, size=20, cache=False)
    assert sum(len(s.train) for s in drawn.sites) == 96
    assert any("no folds" in note for note in drawn.source["notes"])
    with pytest.raises(BadInput, match="12,393 of 12,413 images of BCN missing"):
        isic.fed_isic2019(tmp_path)
    for i, row in enumerate(rows):
        row["fold"] = "test" if i % 5 == 0 else "train"
    table(tmp_path / "train_test_split", rows)
    with pytest.raises(BadInput, match="BCN: 9,914 of 9,930 images of train missing"):
        isic.fed_isic2019(tmp_path)


def test_fed_isic2019_from_raw_metadata(tmp_path):
    """Centers from the prefix of lesion_id and HAM10000's `dataset`; images without a lesion_id are left out."""
    parts = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
    lesions = {"BCN": "BCN_000{}", "MSK": "MSK4_000{}", "": ""} | {f"HAM {p}": "HAM_000{}" for p in parts}
    meta, truth, ham = [], [], []
    for n, (centre, prefix) in enumerate(lesions.items()):
        for i in range(10):
            image = f"ISIC_{n}{i:02d}"
            picture(tmp_path / "ISIC_2019_Training_Input" / f"{image}.jpg", n, (30, 24))
            meta.append({"image": image, "age_approx": 50, "lesion_id": prefix.format(i), "sex": "female"})
            truth.append(
                {"image": image, **{c: float(c == isic.CLASSES[(n + i) % 8]) for c in isic.CLASSES}, "UNK": 0.0}
            )
            if centre.startswith("HAM"):
                ham.append({"lesion_id": prefix.format(i), "image_id": image, "dataset": centre.removeprefix("HAM ")})
    table(tmp_path / "ISIC_2019_Training_Metadata.csv", meta)
    table(tmp_path / "ISIC_2019_Training_GroundTruth.csv", truth)
    assert isic.layout(tmp_path) is None, "HAM10000's own table is needed for four of the centres"
    table(tmp_path / "HAM10000_metadata.csv", ham)
    assert isic.layout(tmp_path) == "raw metadata, without FLamby's folds"
    fed = federation("fed-isic2019", root=tmp_path, complete=False, size=10)
    assert [s.name for s in fed.sites] == list(isic.CENTERS)
    assert all(sum(found.values()) == 10 for found in sizes(fed).values()), "ten without a lesion_id are out"
    for n, centre in enumerate(lesions):
        if centre:
            site = fed.site(centre)
            labels = sorted([*site.train.y.tolist(), *site.test.y.tolist()])
            assert labels == sorted((n + i) % 8 for i in range(10))
    assert any("not FLamby's" in note for note in fed.source["notes"])
    comma = (tmp_path / "HAM10000_metadata.csv").read_text()
    (tmp_path / "HAM10000_metadata.csv").unlink()
    (tmp_path / "HAM10000_metadata").write_text(comma.replace(",", "\t"))
    assert federation("fed-isic2019", root=tmp_path, complete=False, size=10).fingerprint() == fed.fingerprint()
    meta[0]["lesion_id"] = "XYZ_1"
    table(tmp_path / "ISIC_2019_Training_Metadata.csv", meta)
    with pytest.raises(BadInput, match=r'ISIC_000: lesion_id "XYZ_1" belongs to no center'):
        federation("fed-isic2019", root=tmp_path, complete=False, size=10)


def test_fed_isic2019_without_two_centers(tmp_path):
    """FLamby's own table lists all six; what is not there is left out and noted, or refused."""
    data_sets.fed_isic2019(tmp_path)
    for i in range(120):
        if i % 6 in (0, 4):
            (tmp_path / "ISIC_2019_Training_Input" / f"ISIC_{i:04d}.jpg").unlink()
    with pytest.raises(BadInput, match="40 of 120 listed images missing, the first is ISIC_0000"):
        isic.fed_isic2019(tmp_path, size=20, cache=False)
    fed = isic.fed_isic2019(tmp_path, complete=False, size=20, cache=False)
    assert [s.name for s in fed.sites] == [isic.CENTERS[i] for i in (1, 2, 3, 5)]
    assert all(parts == {"train": 16, "test": 4} for parts in sizes(fed).values())
    assert any("40 of 120 listed images missing" in note for note in fed.source["notes"])
    shutil.rmtree(tmp_path / "ISIC_2019_Training_Input")
    (tmp_path / "ISIC_2019_Training_Input").mkdir()
    with pytest.raises(BadInput, match="none of the 120 listed images"):
        isic.fed_isic2019(tmp_path, complete=False, size=20, cache=False)


def test_counting_fed_isic2019_opens_no_image(tmp_path):
    """`fednorms data check` counts black stand-ins of one pixel, which cannot be cropped."""
    data_sets.fed_isic2019(tmp_path)
    counted = isic.READER.counted(tmp_path, {"complete": False})
    whole = isic.fed_isic2019(tmp_path, complete=False, size=20, cache=False)
    assert sizes(counted) == sizes(whole)
    assert isic.READER.counted(tmp_path, {"complete": False}).preprocessing.mean == whole.preprocessing.mean


def test_ham10000_alone(tmp_path):
    """HAM10000's own table (image_id, dx, dataset) and folders give four of the centers."""
    words = ("mel", "nv", "bcc", "akiec", "bkl", "df", "vasc")
    parts = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
    rows = [
        {"lesion_id": f"HAM_{i // 2}", "image_id": f"ISIC_{i:03d}", "dx": words[i % 7], "dataset": parts[i // 14]}
        for i in range(56)
    ]
    table(tmp_path / "HAM10000_metadata.csv", rows)
    for i in range(56):
        picture(tmp_path / f"HAM10000_images_part_{1 + i % 2}" / f"ISIC_{i:03d}.jpg", i, (30, 24))
    assert isic.layout(tmp_path) == "HAM10000's own HAM10000_metadata.csv, four of the six centers"
    fed = isic.fed_isic2019(tmp_path, complete=False, size=10, cache=False)
    assert [s.name for s in fed.sites] == [c for c in isic.CENTERS if c.startswith("HAM")]
    for site in fed.sites:
        labels = sorted([*site.train.y.tolist(), *site.test.y.tolist()])
        assert labels == sorted([0, 1, 2, 3, 4, 5, 6] * 2), "akiec is AK; SCC does not occur"
    rows[3]["dx"] = "wart"
    table(tmp_path / "HAM10000_metadata.csv", rows)
    with pytest.raises(BadInput, match='ISIC_003: unknown dx "wart"'):
        isic.fed_isic2019(tmp_path, complete=False, size=10, cache=False)


def test_isic_weights_and_preprocessing():
    expected = [5.5813, 2.0472, 7.0204, 26.1194, 9.5369, 101.0707, 92.5224, 38.3443]
    assert [round(w, 4) for w in isic.WEIGHTS] == expected
    assert math.isclose(isic.WEIGHTS[1] * 0.5**2 * math.log(2), 0.35475, abs_tol=1e-5)
    # Color constancy makes the 6-norm of every channel the same, and keeps the overall length of the scene's color.
    x = np.random.default_rng(0).integers(10, 90, (16, 16, 3)).astype(np.uint8)
    x[..., 0] = x[..., 0] // 2
    y = shades_of_gray(x).astype(float)
    norms = np.power((y**6).mean((0, 1)), 1 / 6)
    assert norms.max() / norms.min() < 1.05
    assert shades_of_gray(np.full((2, 2, 3), 255, np.uint8) * np.array([1, 0, 0], np.uint8)).max() <= 255, "clipped"
    assert shades_of_gray(np.zeros((2, 2, 3), np.uint8)).max() == 0
    wide = Image.new("RGB", (600, 450), (90, 90, 90))
    assert np.asarray(lesion(wide, 200)).shape == (200, 200, 3)
    assert (np.asarray(lesion(wide, 200)) == 90).all()


def test_a_table_lists_each_folder_once(tmp_path, monkeypatch):
    """Entries without folder and ending: the time grows with the rows, not with rows times files."""
    rows = [{"image": f"scan{i}", "label": i % 2, "center": "oslo"} for i in range(12)]
    for i in range(12):
        picture(tmp_path / "scans" / f"scan{i}.png", i)
    table(tmp_path / "study.csv", rows)
    listings, usual = [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: listings.append(self) or usual(self))
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("a search for each row"))
    near = centers._Near(tmp_path)
    assert [near.find(row["image"]) for row in rows] == [tmp_path / "scans" / f"scan{i}.png" for i in range(12)]
    assert sorted(listings) == [tmp_path, tmp_path / "scans"]
    assert near.find("scan") == tmp_path / "scan", "scan0 is another image"


def test_a_table_of_centres(tmp_path):
    rows = []
    for centre in ("oslo", "bonn"):
        for i in range(20):
            picture(tmp_path / "scans" / f"{centre}{i}.png", i)
            label, patient = ("ill", "well")[i % 2], f"{centre}{i // 4}"
            rows.append({"filename": f"{centre}{i}", "label": label, "hospital": centre, "patient": patient})
    path = table(tmp_path / "study.csv", rows)
    fed = federation("centres", root=tmp_path, size=4)
    american = federation("centers", root=tmp_path, size=4)
    assert american.fingerprint() == fed.fingerprint()
    assert american.asked_for == fed.asked_for  # one spelling is stored
    assert fed.classes == ("ill", "well")
    assert sorted(s.name for s in fed.sites) == ["bonn", "oslo"]
    for site in fed.sites:
        patients = [{v // 4 for v in first_values(s)} for s in site.splits.values()]
        assert not patients[0] & patients[1], "no patient in two splits"
        assert sum(len(s) for s in site.splits.values()) == 20
    for i, row in enumerate(rows):
        row["split"] = ("train", "train", "validation", "test")[i % 4]
    table(path, rows)
    given = centers.centers(path, size=4, cache=False)
    assert sizes(given)["oslo"] == {"train": 10, "val": 5, "test": 5}
    rows[3]["split"], rows[5]["filename"] = "holdout", "no-such"
    table(path, rows)
    with pytest.raises(BadInput, match=r"(?s)oslo: 1 row whose fold is not.*1 of 20 listed images missing"):
        centers.centers(path, size=4, cache=False)
    rows[3]["split"], rows[5]["filename"] = "train", "../../etc/passwd"
    table(path, rows)
    with pytest.raises(BadInput, match="not inside its folder"):
        centers.centers(path, size=4, cache=False)
    (tmp_path / "study.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match=r"has no table.*filename.*hospital.*study\.csv has a, b\."):
        centers.centers(tmp_path)
    with pytest.raises(BadInput, match=r"Found no table\."):
        centers.centers(tmp_path / "nowhere")


def test_fed_isic2019_by_lesion(tmp_path):
    """Lesions have one to three images; every fourth lesion is at two centers."""
    rows, lesion, number = [], {}, 0
    for k in range(90):
        for copy in range(1 + k % 3):
            image = f"ISIC_{number:04d}"
            center = (k + (copy if k % 4 == 0 else 0)) % 6
            fold = "test" if number % 5 == 0 else "train"
            rows.append({"image": image, "target": k % 8, "center": center, "fold": fold})
            lesion[image] = f"L{k}"
            picture(tmp_path / "ISIC_2019_Training_Input" / f"{image}.jpg", 50 + number, (40, 30))
            number += 1
    table(tmp_path / "train_test_split", rows)
    options = {"root": tmp_path, "complete": False, "size": 10}
    with pytest.raises(BadInput, match="needs the column lesion_id"):
        federation("fed-isic2019", protocol="lesions", **options)
    table(tmp_path / "lesions.csv", [{"image": i, "lesion_id": whose} for i, whose in lesion.items()])

    def parts(**more):
        with counted_only():
            made = federation("fed-isic2019", **options, **more)
        found = {}
        for site in made.sites:
            for part, split in site.splits.items():
                for path in split.x.files:
                    found.setdefault(lesion[path.stem], set()).add(part)
        return made, found

    official, divided = parts()
    known = sum(row["fold"] == "test" and "train" in divided[lesion[row["image"]]] for row in rows)
    assert any(note.startswith(f"{known} of ") for note in official.source["notes"])
    for more in ({}, {"val": 0.2}):
        made, found = parts(protocol="lesions", **more)
        assert all(len(where) == 1 for where in found.values())
        assert len(found) == 90
        tests = sum(len(site.test) for site in made.sites if site.test is not None)
        assert tests == pytest.approx(0.2 * number, abs=12)  # few images per center and diagnosis
        assert ("val" in set().union(*found.values())) == bool(more)
    _, validated = parts(val=0.2)
    assert not any({"train", "val"} <= where for where in validated.values())
