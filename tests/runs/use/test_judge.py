"""Judging a run: on its own data, on labelled folders and federations, with classes matched by name."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import fednorms as fn
from fednorms.cli import main
from fednorms.runs.store import predictions as store
from fednorms.runs.store.directory import RunDirectory

COLORS = {"benign": (40, 160, 60), "malignant": (170, 60, 50)}


def picture(path, color, seed):
    noise = np.random.default_rng(seed).integers(-60, 60, (8, 8, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)).save(path)


def folder(root, sites, each=10, classes=COLORS):
    for k, site in enumerate(sites):
        for c, (name, color) in enumerate(classes.items()):
            for i in range(each):
                picture(root / site / name / f"patient{i // 2}-{i}.png", color, 1000 * k + 100 * c + i)
    return root


@pytest.fixture(scope="module")
def clinics(tmp_path_factory):
    root = tmp_path_factory.mktemp("clinics")
    data = folder(root / "data", ["north", "south"], each=20)
    for method in ("fedavg", "fedbn"):
        recipe = fn.Recipe(method=method, federation=str(data), rounds=2, data={"val": 0.2, "test": 0.4})
        fn.run(recipe=recipe, out=root / method)
    return root


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("fresh") / "oslo", [""], each=6)


def test_own_data_give_the_scores_of_the_run(clinics):
    found = fn.judge(clinics / "fedbn")
    scores = fn.evaluate_run(clinics / "fedbn")
    assert list(found) == list(scores) == ["personal/own/test"]
    for name, judgement in found.items():
        for site, s in judgement.sites.items():
            assert s.accuracy.value == pytest.approx(scores[name].sites[site].accuracy)
            assert s.cross_entropy.value == pytest.approx(scores[name].sites[site].loss)
            assert s.classes["malignant"].recall.value == pytest.approx(scores[name].sites[site].recall[1])
        assert judgement.mean.value == pytest.approx(scores[name].mean)


def test_a_folder_of_classes_is_one_site_and_all_of_its_images_are_used(clinics, fresh):
    found = fn.judge(clinics / "fedavg", fresh)["global/global/test"]
    assert list(found.sites) == ["oslo"]
    assert found.pooled.n == 12
    said = fn.predict(clinics / "fedavg", fresh)
    right = np.mean([p.label == p.file.parent.name for p in said])
    assert found.pooled.accuracy.value == pytest.approx(right)


def test_a_folder_of_sites_and_a_subset_of_classes(clinics, tmp_path):
    data = folder(tmp_path / "more", ["east", "west"], each=3)
    shutil.rmtree(data / "west" / "benign")
    found = fn.judge(clinics / "fedavg", data)["global/global/test"]
    assert list(found.sites) == ["east", "west"]
    assert found.sites["west"].n == 3
    assert not found.sites["west"].auroc.defined
    assert any('class "benign" at "west"' in note for note in found.notes)
    assert any("Too few images" in note for note in found.notes)


def test_layouts_as_people_download_them_are_read(clinics, fresh, tmp_path):
    plain = fn.judge(clinics / "fedavg", fresh)["global/global/test"]
    spelled = tmp_path / "archive" / "data" / "Oslo" / "images"
    for label in COLORS:
        shutil.copytree(fresh / label, spelled / label.title())
    for folder_, site in ((spelled, "images"), (spelled.parent, "Oslo"), (tmp_path, "Oslo")):
        found = fn.judge(clinics / "fedavg", folder_)["global/global/test"]
        assert list(found.sites) == [site]
        assert found.pooled.confusion == plain.pooled.confusion
    shutil.copytree(spelled.parent, spelled.parents[1] / "Bergen")
    assert list(fn.judge(clinics / "fedavg", tmp_path)["global/global/test"].sites) == ["Bergen", "Oslo"]


def test_images_that_the_run_trained_on_are_noted(clinics, fresh):
    def said(data):
        return [n for n in fn.judge(clinics / "fedavg", data)["global/global/test"].notes if "too good" in n]

    assert len(said(clinics / "data")) == len(said(clinics / "data" / "north")) == 1
    assert not said(fresh)
    folder(clinics / "data" / "visitors" / "oslo", [""], each=2)  # in the folder, but not a site of the run
    try:
        assert not said(clinics / "data" / "visitors" / "oslo")
    finally:
        shutil.rmtree(clinics / "data" / "visitors")


def test_classes_in_another_order_are_matched_by_name(clinics):
    x = np.zeros((8, 8, 8, 3), np.uint8)
    for i in range(8):
        x[i] = COLORS["malignant" if i % 2 else "benign"]
    y = np.arange(8) % 2
    same = fn.from_arrays({"a": {"train": (x, y), "test": (x, y)}}, classes=["benign", "malignant"])
    turned = fn.from_arrays({"a": {"train": (x, y), "test": (x, 1 - y)}}, classes=["malignant", "benign"])
    one, other = (fn.judge(clinics / "fedavg", data)["global/global/test"] for data in (same, turned))
    assert one.to_dict() == other.to_dict()


def test_unknown_classes_and_other_sizes_are_refused(clinics, tmp_path):
    x, y = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4) % 2
    with pytest.raises(fn.BadInput, match=r"does not know: cat.*The run has benign, malignant"):
        fn.judge(
            clinics / "fedavg", fn.from_arrays({"a": {"train": (x, y), "test": (x, y)}}, classes=["benign", "cat"])
        )
    large = np.zeros((4, 9, 9, 3), np.uint8)
    big = fn.from_arrays({"a": {"train": (large, y), "test": (large, y)}}, classes=list(COLORS))
    with pytest.raises(fn.BadInput, match=r"\(3, 9, 9\).*\(3, 8, 8\)"):
        fn.judge(clinics / "fedavg", big)
    for name in ("flat/a/x.png", "cats/benign/x.png", "cats/cat/x.png"):
        picture(tmp_path / name, (1, 2, 3), 0)
    with pytest.raises(fn.BadInput, match=r"expected class/image or site/class/image.*benign, malignant.*found a"):
        fn.judge(clinics / "fedavg", tmp_path / "flat")
    with pytest.raises(fn.BadInput, match=r"class folders cat are not among"):
        fn.judge(clinics / "fedavg", tmp_path / "cats")
    with pytest.raises(fn.BadInput, match="No federation"):
        fn.judge(clinics / "fedavg", "nowhere/at/all")


def test_a_corrupt_image_is_named(clinics, tmp_path):
    data = folder(tmp_path / "new", [""], each=2)
    (data / "benign" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(fn.BadInput, match=r"broken\.png"):
        fn.judge(clinics / "fedavg", data)
    found = fn.judge(clinics / "fedavg", data, skip_broken=True)["global/global/test"]
    assert found.pooled.n == 4
    assert any("broken.png" in note for note in found.notes)
    several = folder(tmp_path / "several", ["bonn", "lund"], each=2)
    (several / "lund" / "benign" / "broken.png").write_bytes(b"not an image")
    found = fn.judge(clinics / "fedavg", several, skip_broken=True)["global/global/test"]
    assert any('"lund/benign/broken.png"' in note for note in found.notes)
    with pytest.raises(fn.BadInput, match="skip_broken=True is for other data"):
        fn.judge(clinics / "fedavg", skip_broken=True)


def test_a_new_site_gets_the_averaged_model_by_default_and_a_clients_if_named(clinics, fresh):
    assert list(fn.judge(clinics / "fedbn", fresh)) == ["averaged/global/test"]
    with pytest.raises(fn.BadInput, match=r"oslo\) is a client of the run \(north, south\).*site="):
        fn.judge(clinics / "fedbn", fresh, ["personal"])
    said = set()
    for ask in (
        lambda site: fn.judge(clinics / "fedbn", fresh, site=site),
        lambda site: fn.predict(clinics / "fedbn", fresh, site=site),
    ):
        with pytest.raises(fn.BadInput, match='This run has no site "nrth": did you mean "north"') as unknown:
            ask("nrth")
        said.add(str(unknown.value))
    assert len(said) == 1
    found = fn.judge(clinics / "fedbn", fresh, ["personal"], site="north")["personal/own/test"]
    said = fn.predict(clinics / "fedbn", fresh, site="north")
    assert found.pooled.accuracy.value == pytest.approx(np.mean([p.label == p.file.parent.name for p in said]))
    averaged = fn.judge(clinics / "fedbn", fresh)["averaged/global/test"]
    said = fn.predict(clinics / "fedbn", fresh, averaged=True)
    assert averaged.pooled.accuracy.value == pytest.approx(np.mean([p.label == p.file.parent.name for p in said]))


def test_sites_that_trained_are_known_by_name(clinics):
    data = folder(clinics / "again", ["north", "oslo"], each=3)
    found = fn.judge(clinics / "fedbn", data)
    assert list(found) == ["personal/own/test", "averaged/global/test"]
    assert list(found["personal/own/test"].sites) == ["north"]
    assert any("oslo" in note and "left out" in note for note in found["personal/own/test"].notes)
    assert list(found["averaged/global/test"].sites) == ["north", "oslo"]


def test_patients_widen_the_intervals(clinics, fresh):
    found = fn.judge(clinics / "fedavg", fresh, group="(patient[0-9]+)")["global/global/test"]
    assert found.pooled.groups == 3
    with pytest.raises(fn.BadInput, match="matches nothing"):
        fn.judge(clinics / "fedavg", fresh, group="case[0-9]+")


def test_the_threshold_is_chosen_on_validation_and_reported_on_test(clinics):
    found = fn.judge(clinics / "fedavg", sensitivity=0.9)["global/global/test"]
    point = found.pooled.operating_point
    val = fn.judge(clinics / "fedavg", split="val")["global/global/val"]
    assert point.rule == "sensitivity 0.9"
    assert point.positive == "malignant"
    assert point.chosen_on == val.pooled.n
    assert val.pooled.operating_point is None
    assert sum(map(sum, point.confusion)) == found.pooled.n
    other = fn.judge(clinics / "fedavg", positive="benign")["global/global/test"].pooled.operating_point
    assert (other.positive, other.rule) == ("benign", "Youden's J")


def test_bad_requests_are_explained(clinics, tmp_path):
    run = clinics / "fedavg"
    for options, said in (
        ({"sensitivity": 95}, "above 0 and at most 1"),
        ({"positive": "ill"}, "expected benign or malignant"),
        ({"sensitivity": 0.9, "split": "val"}, "cannot be reported on them"),
        ({"site": "north"}, r"site= is for other data.*data="),
        ({"group": "x"}, "group= is for other data"),
        ({"split": "holdout"}, "Unknown split"),
        ({"modes": ["personal/own"]}, "keep no statistics"),
        ({"data": tmp_path, "modes": ["global"]}, "no labelled images"),
        ({"data": "digits-shift"}, "does not know"),
    ):
        with pytest.raises(fn.BadInput, match=said):
            fn.judge(run, **options)
    with pytest.raises(fn.BadInput, match="not a run"):
        fn.judge(tmp_path)


def test_the_threshold_of_one_sites_model_is_chosen_on_its_validation_images(clinics, fresh):
    found = fn.judge(clinics / "fedbn", fresh, site="south")["personal/own/test"]
    validation = fn.judge(clinics / "fedbn", split="val")["personal/own/val"]
    chosen_on = found.pooled.operating_point.chosen_on
    assert chosen_on == validation.sites["south"].n < validation.pooled.n


def test_without_validation_images_no_threshold_is_chosen(tmp_path):
    data = folder(tmp_path / "data", ["north"], each=10)
    fn.run(recipe=fn.Recipe(federation=str(data), rounds=1, data={"val": 0.0, "test": 0.4}), out=tmp_path / "run")
    found = fn.judge(tmp_path / "run")["global/global/test"]
    assert found.pooled.operating_point is None
    assert any("No threshold was chosen" in note for note in found.notes)
    with pytest.raises(fn.BadInput, match=r"No threshold can be chosen: No site .* validation images"):
        fn.judge(tmp_path / "run", sensitivity=0.9)
    with pytest.raises(fn.BadInput, match=r"no val images. Choose test or train"):
        fn.judge(tmp_path / "run", split="val")


def test_what_is_judged_on_the_runs_own_data_is_kept_with_it(clinics):
    directory = RunDirectory(clinics / "fedbn")
    found = fn.judge(clinics / "fedbn", modes=["averaged"])["averaged/global/test"]
    kept = store.read(directory, 2, "averaged/global")
    right = np.concatenate([p.probabilities.argmax(1) == p.labels for p in kept.values()])
    assert found.pooled.accuracy.value == pytest.approx(right.mean())
    assert not fn.verify(clinics / "fedbn").damaged


def test_the_command_prints_classes_and_writes_everything(clinics, fresh, tmp_path, capsys):
    assert main(["evaluate", str(clinics / "fedavg"), "--out", str(tmp_path / "all.json")]) == 0
    said = capsys.readouterr().out
    for words in ("model/statistics/split", "malignant", "worst class", "worst site", "sensitivity", "calibration"):
        assert words in said
    told = json.loads((tmp_path / "all.json").read_text())
    assert set(told) == {"run", "which", "data", "scores", "judgements"}
    read = fn.Judgement.from_dict(told["judgements"]["global/global/test"])
    assert read.to_dict() == fn.judge(clinics / "fedavg")["global/global/test"].to_dict()
    assert main(["evaluate", str(clinics / "fedavg"), "--data", str(fresh), "--full"]) == 0
    said = capsys.readouterr().out
    for words in ("confusion matrix: oslo", "AUPRC", "negative predictive value", "Brier"):
        assert words in said
    assert main(["evaluate", str(clinics / "fedavg"), "--out", str(tmp_path / "no" / "x.json")]) == 2
    assert main(["evaluate", str(clinics / "fedavg"), "--data", str(tmp_path / "gone")]) == 2
