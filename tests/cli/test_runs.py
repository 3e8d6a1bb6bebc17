"""Runs from the command line: recipes from files and options, interruption and resume, and what comes after."""

from __future__ import annotations

import csv
import json
import os
import signal
import tomllib

import pytest

from fednorms.cli import main
from tests.cli.conftest import fednorms, held
from tests.support.waiting import HANG

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def quick(folder, *more):
    return ["--federation", folder, "--batch-size", "4", "--threads", "1", *more]


def checkpoint_bytes(run):
    """The last checkpoint, file by file."""
    last = sorted((run / "checkpoints").glob("round-*"))[-1]
    files = [*last.glob("*.safetensors"), *(run / "checkpoints" / "clients").glob("*")]
    assert files
    return {str(f.relative_to(run)): f.read_bytes() for f in files}


def without_times(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A finished run of two rounds, made by `--json` from a file and options together."""
    home = tmp_path_factory.mktemp("trained")
    (home / "base.toml").write_text('method = "fedprox(mu=0.1)"\nrounds = 9\n[training]\nlr = 0.3\nmomentum = 0.5\n')
    said = fednorms("run", "base.toml", *quick(folder, "--method", "fedbn", "--rounds", "2", "--json"), cwd=home)
    assert said.code == 0, said.err
    return home, said


def test_a_file_and_options_make_one_recipe_and_options_win(trained, folder):
    home, said = trained
    assert not said.err
    run = home / said.json["path"]
    assert run == home / "runs" / f"fedbn-{folder.name}-0"  # named after method, federation and seed
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    assert (recipe["method"], recipe["rounds"]) == ("fedbn", 2)  # the options
    assert (recipe["training"]["lr"], recipe["training"]["momentum"]) == (0.3, 0.5)  # the file
    assert recipe["training"]["batch_size"] == 4
    assert recipe["training"]["epochs"] == 1
    assert said.json["recipe"]["method"] == "fedbn"
    assert said.json["rounds"] == 2
    assert set(said.json["domains"]) == {"north", "south"}


def test_progress_goes_to_stderr_and_quiet_and_a_second_call_train_nothing(folder, tmp_path, capsys):
    said = fednorms("run", *quick(folder, "--rounds", "2", "--out", tmp_path / "run"))
    assert said.code == 0
    assert "round 2/2" in said.err
    assert "accuracy" in said.err
    assert "north" in said.err
    assert "loss" in said.err
    assert "round 2/2" not in said.out
    assert "test accuracy" in said.out
    assert str(tmp_path / "run") in said.out
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["run", *map(str, quick(folder, "--rounds", "2", "--out", tmp_path / "run", "--quiet"))]) == 0
    assert capsys.readouterr() == (said.out, "")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_directory_of_another_recipe_is_refused(trained, folder, capsys):
    home, said = trained
    out = str(home / said.json["path"])
    assert main(["run", *map(str, quick(folder, "--method", "fedavg", "--out", out))]) == 2
    err = capsys.readouterr().err
    assert "another recipe" in err
    assert f"fednorms resume {out}" in err


def test_kill_9_and_resume_end_with_the_same_bytes(folder, tmp_path):
    options = quick(folder, "--method", "scaffold + fedbn", "--rounds", "40", "--momentum", "0.5")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with held("run", *options, "--out", killed, "--quiet", run=killed, number=3) as process:
        process.kill()
        process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGKILL
    assert len(without_times(killed)) == 3
    assert fednorms("resume", killed, "--quiet").code == 0
    assert main(["run", *map(str, options), "--out", str(whole), "--quiet"]) == 0
    assert checkpoint_bytes(killed) == checkpoint_bytes(whole)
    assert without_times(killed) == without_times(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_are_130_and_say_how_to_continue(folder, tmp_path, number):
    run = tmp_path / "run"
    with held("run", *quick(folder, "--rounds", "20", "--out", run), run=run, number=2) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert not out
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last == f"fednorms: Interrupted after round 1; continue with: fednorms resume {run}"
    assert len(without_times(run)) == 2  # the second round is written, but not checkpointed


def test_evaluate(trained, capsys):
    home, said = trained
    assert main(["evaluate", str(home / said.json["path"]), "--modes", "personal", "unseen/batch", "--json"]) == 2
    assert "unseen" in capsys.readouterr().err  # this federation has no unseen site
    assert main(["evaluate", str(home / said.json["path"]), "--modes", "personal", "personal/batch", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert set(scores) == {"personal/own/test", "personal/batch/test"}
    assert scores["personal/own/test"]["mean"] == said.json["accuracy"]
    assert main(["evaluate", str(home / said.json["path"]), "--split", "val", "--which", "best"]) == 0
    assert "personal/own/val" in capsys.readouterr().out


def test_predict_export_and_adapt(trained, folder, tmp_path, capsys):
    home, said = trained
    run = str(home / said.json["path"])
    table = tmp_path / "predictions.csv"
    assert main(["predict", run, str(folder / "north"), "--site", "north", "--out", str(table)]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 12
    assert {row["class"] for row in rows} <= {"cat", "dog"}
    assert all(abs(float(row["cat"]) + float(row["dog"]) - 1) < 1e-5 for row in rows)
    capsys.readouterr()
    assert main(["predict", run, str(folder / "north" / "cat" / "0.png"), "--site", "north", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["predictions"]
    assert one["label"] == next(row["class"] for row in rows if row["file"].endswith("cat/0.png"))

    assert main(["export", run, "--out", str(tmp_path / "model"), "--site", "south"]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert "model.json" in capsys.readouterr().out
    assert main(["export", run, "--out", str(tmp_path / "other"), "--site", "suoth"]) == 2
    assert "south" in capsys.readouterr().err

    command = ["adapt", run, str(folder / "south"), "--epochs", "1", "--out", str(tmp_path / "adapted"), "--json"]
    assert main(command) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["before"]
    assert done["after"]
    assert done["fine_tuned"]
    assert (tmp_path / "adapted" / "model.json").exists()


def test_early_stopping_without_validation_images_names_the_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--val", "0", "--patience", "3", "--rounds", "1"]) == 2
    assert "Hold some out with --val" in " ".join(capsys.readouterr().err.split())
