"""A hospital network's folders on the command line: nothing is dropped silently, and every mistake is one message."""

from __future__ import annotations

import csv
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fednorms as fn
from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.data import from_folders
from fednorms.data.folders import read_image, read_images
from fednorms.runs.store.directory import RunDirectory

SMALL = ("--size", "8", "--rounds", "2", "--model", "cnn-small", "--batch-size", "4")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # the default place of runs


def put(path: Path, shade: int, size=(8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), shade, np.uint8)).save(path)
    return path


@pytest.fixture
def sites(tmp_path):
    root = tmp_path / "sites"
    for site, base in (("north", 20), ("south", 90), ("west", 160)):
        for k, label in enumerate(("ill", "well")):
            for i in range(10):
                put(root / site / label / f"patient{i // 2}-{i}.png", base + 40 * k + i)
    return root


def ask(capsys, *args):
    code = main([str(a) for a in args])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_run_from_python_on_folders_is_continued_by_the_command_line(sites, capsys, tmp_path):
    federation = from_folders(sites, size=8, channels=1, test=0.4, group=r"(patient\d+)")
    settings = {"batch_size": 4, "lr": 0.1}
    whole = fn.run("fedbn", federation, rounds=3, out=tmp_path / "whole", **settings)
    fn.run("fedbn", federation, rounds=2, out=tmp_path / "run", **settings)
    assert ask(capsys, "resume", tmp_path / "run", "--rounds", 3, "--quiet")[0] == 0
    rows = [RunDirectory(tmp_path / name).metrics() for name in ("whole", "run")]
    assert [[row["train_loss"], row["scores"]] for row in rows[0]] == [[r["train_loss"], r["scores"]] for r in rows[1]]
    code, out, _ = ask(capsys, "evaluate", tmp_path / "run", "--json")
    assert code == 0
    assert f"{whole.accuracy}" in out
    put(tmp_path / "new" / "ill" / "a.png", 40)
    put(tmp_path / "new" / "well" / "b.png", 90)
    assert ask(capsys, "adapt", tmp_path / "run", tmp_path / "new", "--test", 0)[0] == 0


# -- folders ---------------------------------------------------------------------------------------------------------


def test_images_that_would_be_left_out_are_an_error(sites):
    put(sites / "north" / "ill" / "patient9" / "a.png", 9)
    with pytest.raises(BadInput, match=r"north/ill. has folders \(.patient9.\) next to images"):
        from_folders(sites)


def test_folders_without_images_are_harmless(sites):
    (sites / "north" / "ill" / "notes").mkdir()
    put(sites / "north" / "ill" / "@eaDir" / "thumb.png", 3)
    assert len(from_folders(sites).sites) == 3


def test_images_in_other_places_are_an_error(tmp_path, sites):
    root = tmp_path / "divided"
    for label in ("a", "b"):
        put(root / "s" / "train" / label / "x.png", 3)
    assert len(from_folders(root).sites) == 1
    put(root / "s" / "loose.png", 3)
    with pytest.raises(BadInput, match="1 images next to its folders"):
        from_folders(root)
    put(sites / "stray.png", 3)
    with pytest.raises(BadInput, match="1 images next to its site folders"):
        from_folders(sites)


def test_images_next_to_class_folders_are_an_error(sites):
    put(sites / "north" / "stray.png", 9)
    with pytest.raises(BadInput, match=r"north. has 1 images next to its class folders"):
        from_folders(sites)


def test_other_files_and_classes_that_look_alike_are_noted(sites, capsys):
    (sites / "north" / "ill" / "scan.dcm").write_bytes(b"x")
    (sites / "north" / "readme.txt").write_text("x")  # next to class folders, where no images are expected
    put(sites / "south" / "Ill" / "b.png", 3)
    notes = from_folders(sites).source["notes"]
    assert len(notes) == 2
    assert "1 of .dcm" in notes[0]
    assert "differ only in case, blanks or encoding" in notes[1]
    _, out, _ = ask(capsys, "data", "check", sites)
    assert "1 of .dcm" in out


def test_exif_rotation_is_applied(tmp_path):
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    root = tmp_path / "sites"
    for label in ("a", "b"):
        path = root / "s" / label / "p.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path, exif=exif)
    upright = torch.from_numpy(np.rot90(pixels, -1).copy()).permute(2, 0, 1)
    found = from_folders(root, val=0, test=0, cache=False)
    assert found.shape == (3, 8, 4)
    assert torch.equal(found.sites[0].train.x[0], upright)
    assert torch.equal(read_image(path, (3, 8, 4)), upright)
    stored = read_images(root, [path], (3, 4, 8), cache=False)  # a published data set, as its papers read it
    assert torch.equal(stored[0], torch.from_numpy(pixels).permute(2, 0, 1))


def test_images_of_a_patient_stay_together(sites, capsys, tmp_path):
    data = fn.Recipe(federation=str(sites), data={"size": 8, "group": r"(patient\d+)", "val": 0.2, "test": 0.2}).data
    found = fn.federation(sites, size=8, group=data.group, val=0.2, test=0.2)
    shades = {part: set() for part in ("train", "val", "test")}
    for site in found.sites:
        for part, split in site.splits.items():
            shades[part] |= {(site.name, int(x[0, 0, 0]) // 2) for x in split.x}
    assert not shades["train"] & shades["test"]
    assert not shades["train"] & shades["val"]
    with pytest.raises(BadInput, match="group is for folders"):
        fn.federation("digits-shift", group="x")
    code, *_ = ask(capsys, "run", "--federation", sites, *SMALL, "--group", r"(patient\d+)", "--out", tmp_path / "r")
    assert code == 0
    assert 'group = "(patient' in (tmp_path / "r" / "recipe.toml").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_named(sites, capsys):
    (sites / "north").chmod(0)
    try:
        code, _, err = ask(capsys, "data", "check", sites)
    finally:
        (sites / "north").chmod(0o700)
    assert code == 2
    assert "cannot be read" in err


# -- results ---------------------------------------------------------------------------------------------------------


def test_a_run_without_test_images_shows_what_it_has(sites, capsys, tmp_path):
    code, out, _ = ask(capsys, "run", "--federation", sites, *SMALL, "--test", "0", "--out", tmp_path / "r")
    assert code == 0
    assert "global/global validation accuracy" in out
    code, _, err = ask(capsys, "evaluate", tmp_path / "r", "--modes", "global")
    assert code == 2
    assert "sites that train have no test images. Choose val or train (--split)." in err
    assert "unseen" not in err
    code, out, _ = ask(capsys, "run", "--federation", sites, *SMALL, "--test", "0", "--val", "0", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2
    result = fn.run("fedavg", fn.federation(sites, size=8, val=0, test=0), rounds=1, batch_size=4)
    assert "not tested: there are no test images" in repr(result)


def test_clients_are_shown_with_the_worst_first(capsys, tmp_path):
    divided = ("--size", "8", "--test", "0.4", "--partition", "dirichlet_client(beta=0.3, clients=5, within=domain)")
    assert ask(capsys, "run", "--rounds", "1", *divided, "--out", tmp_path / "r")[0] == 0
    code, out, _ = ask(capsys, "evaluate", tmp_path / "r", "--clients")
    assert code == 0
    head, *lines = out[out.index("global/global/test, the worst 20 of 25 sites") :].splitlines()[1:22]
    assert head.split() == ["site", "domain", "images", "accuracy", "balanced", "loss"]
    shown = {line.split()[0]: float(line.split()[3]) for line in lines}
    scores = json.loads(ask(capsys, "evaluate", tmp_path / "r", "--json")[1])["scores"]["global/global/test"]["sites"]
    worst = sorted(scores, key=lambda site: scores[site]["accuracy"])[:20]
    assert shown == {site: pytest.approx(100 * scores[site]["accuracy"], abs=0.05) for site in worst}
    assert list(shown) == worst
    assert "site " not in ask(capsys, "evaluate", tmp_path / "r")[1]


def test_sites_are_shown_in_the_metric_of_the_run(capsys, tmp_path):
    divided = ("--size", "8", "--test", "0.4", "--partition", "dirichlet_client(beta=0.3, clients=5, within=domain)")
    given = ("--rounds", "1", *divided, "--metric", "balanced_accuracy", "--out", tmp_path / "r")
    assert ask(capsys, "run", *given)[0] == 0
    code, out, _ = ask(capsys, "evaluate", tmp_path / "r", "--clients")
    assert code == 0
    scores = json.loads(ask(capsys, "evaluate", tmp_path / "r", "--json")[1])["scores"]["global/global/test"]
    sites = scores["sites"]
    lines = out[out.index("the worst 20 of 25 sites") :].splitlines()[2:22]
    assert [line.split()[0] for line in lines] == sorted(sites, key=lambda s: sites[s]["balanced_accuracy"])[:20]
    names, numbers = (line.split() for line in out.splitlines()[:2])
    shown = dict(zip(names, numbers, strict=True))
    clean = [site["balanced_accuracy"] for name, site in sites.items() if name.startswith("clean")]
    assert float(shown["clean"]) == pytest.approx(100 * sum(clean) / len(clean), abs=0.051)
    assert float(shown["mean"]) == pytest.approx(100 * scores["balanced_accuracy"], abs=0.051)
    assert float(shown["accuracy"]) == pytest.approx(100 * scores["mean"], abs=0.051)
    assert "Balanced accuracy in percent" in out


def test_unseen_sites_are_in_the_result(sites, capsys, tmp_path):
    code, out, _ = ask(capsys, "run", "--federation", sites, *SMALL, "--hold-out", "west")
    assert code == 0
    lines = [line for line in out.splitlines() if "test accuracy" in line]
    assert lines, out
    assert [line.split()[0].split("/")[0] for line in lines] == ["global", "unseen"]
    alone = ("--hold-out", "west", "--evaluate", "unseen", "--out", tmp_path / "alone")
    code, out, _ = ask(capsys, "run", "--federation", sites, *SMALL, *alone)
    assert code == 0
    assert "unseen/" in out


def test_balanced_accuracy_comes_first_if_requested(sites):
    data = fn.federation(sites, size=8)
    recipe = fn.Recipe(metric="balanced_accuracy", rounds=2, training={"batch_size": 4})
    result = fn.run("fedavg", data, recipe=recipe)
    line = repr(result).splitlines()[1]
    assert f"balanced accuracy {100 * result.scores().balanced_accuracy:.1f} % (worst" in line
    assert "), accuracy " in line
    if result.best:
        best = result.scores(which="best").balanced_accuracy
        assert f"(round {result.best['round']}): {100 * best:.1f} %" in repr(result)


def test_a_comparison_without_test_images_has_not_failed(sites, capsys, tmp_path):
    given = ("--federation", sites, *SMALL, "--test", "0", "--seeds", "1", "--out", tmp_path / "c", "--quiet")
    code, out, _ = ask(capsys, "compare", "--methods", "fedavg", *given)
    assert code == 0
    assert "failed" not in out
    assert "no test images" in out


def test_a_damaged_checkpoint_is_reported_by_every_command_that_reads_it(sites, capsys, tmp_path):
    run = tmp_path / "r"
    assert ask(capsys, "run", "--federation", sites, *SMALL, "--checkpoint-every", "1", "--out", run)[0] == 0
    file = max(RunDirectory(run).checkpoints.glob("round-*/server.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    said = ask(capsys, "export", run, "--out", tmp_path / "e")
    assert said[0] == 0
    assert "damaged" in said[1] + said[2]
    said = ask(capsys, "predict", run, sites / "north" / "ill")
    assert said[0] == 0
    assert "damaged" in said[1] + said[2]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = ask(capsys, "evaluate", run)
    assert code == 0
    assert err.startswith("note: ")  # in one line, and not as Python shows warnings
    assert "damaged" in err.splitlines()[0]


def test_changed_images_are_reported(sites, capsys, tmp_path):
    given = ("run", "--federation", sites, *SMALL, "--out", tmp_path / "r")
    assert ask(capsys, *given)[0] == 0
    file = next((sites / "north" / "ill").iterdir())
    with Image.open(file) as image:
        size = image.size
    Image.new("RGB", size, (1, 2, 3)).save(file)
    code, _, err = ask(capsys, *given)
    assert code == 2
    assert "on other data: images or labels of the federation have changed since" in err


def test_an_impossible_run_directory_is_bad_input(sites, capsys, tmp_path):
    code, _, err = ask(capsys, "run", "--federation", sites, *SMALL, "--out", tmp_path / ("x" * 300))
    assert code == 2
    assert "Cannot create a run at" in err
    assert "File name too long" in err


def test_a_rate_without_epochs_is_refused(sites, capsys, tmp_path):
    assert ask(capsys, "run", "--federation", sites, *SMALL, "--out", tmp_path / "r")[0] == 0
    code, _, err = ask(capsys, "adapt", tmp_path / "r", sites / "north", "--lr", "0.1")
    assert code == 2
    assert "--epochs" in err


def test_a_run_that_diverges_at_once_leaves_its_directory_free(sites, capsys, tmp_path):
    given = ("run", "--federation", sites, *SMALL, "--out", tmp_path / "my run")
    code, _, err = ask(capsys, *given, "--lr", "1e30")
    assert code == 1
    assert "diverged in round" in err
    assert not (tmp_path / "my run" / "recipe.toml").exists()
    assert ask(capsys, *given, "--lr", "0.01")[0] == 0
    code, _, err = ask(capsys, *given, "--lr", "0.02")
    assert code == 2
    assert f"`fednorms resume '{tmp_path / 'my run'}'`" in err


# -- names and targets -----------------------------------------------------------------------------------------------


@pytest.fixture
def trained(sites, capsys, tmp_path):
    assert ask(capsys, "run", "--federation", sites, *SMALL, "--out", tmp_path / "trained")[0] == 0
    return tmp_path / "trained"


def test_brackets_in_names_are_not_markup(trained, capsys, tmp_path):
    odd = put(tmp_path / "new" / "[bold]x[" / "foo[" / "bar].png", 5)
    code, out, _ = ask(capsys, "predict", trained, odd)
    assert code == 0
    assert "[bold]x[" in out.replace("\n", "")


def test_file_names_that_are_not_text_do_not_stop_a_table(trained, capsys, tmp_path):
    folder = tmp_path / "new"
    put(folder / "a.png", 5)
    try:
        os.rename(os.fsencode(folder / "a.png"), os.fsencode(folder) + b"/\xff.png")
    except OSError:
        pytest.skip("the file system takes text alone")
    code, *_ = ask(capsys, "predict", trained, folder, "--out", tmp_path / "p.csv")
    assert code == 0
    assert len(list(csv.reader((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()))) == 2


def test_a_missing_directory_is_found_before_the_work(trained, sites, capsys, tmp_path):
    code, _, err = ask(capsys, "predict", trained, sites / "north", "--out", tmp_path / "no" / "p.csv")
    assert code == 2
    assert "does not exist" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    code, _, err = ask(capsys, "adapt", trained, sites / "north", "--epochs", "100000", "--out", tmp_path / "full")
    assert code == 2
    assert "not empty" in err


@pytest.mark.parametrize(("option", "value"), [("--size", "-4"), ("--size", "0"), ("--lr", "nan"), ("--lr", "inf")])
def test_adapt_refuses_numbers_that_make_no_sense(trained, sites, capsys, option, value):
    code, _, err = ask(capsys, "adapt", trained, sites / "north", option, value)
    assert code == 2
    assert "adapt:" in err


@pytest.mark.parametrize("weights", [("nan", "1"), ("inf", "1"), ("0", "1"), ("-1", "1")])
def test_class_weights_that_give_no_loss_are_refused(sites, capsys, tmp_path, weights):
    given = ("run", "--federation", sites, *SMALL, "--class-weights", *weights, "--out", tmp_path / "r")
    code, _, err = ask(capsys, *given)
    assert code == 2
    assert "class_weights needs 2 numbers above 0" in err
    assert not (tmp_path / "r").exists()
