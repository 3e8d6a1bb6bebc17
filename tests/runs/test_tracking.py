"""Trackers: what real packages have written to disk, and that none of them can end a run."""

from __future__ import annotations

import json

import pytest

import fednorms as fn
from fednorms.runs.tracking import tracking as module
from fednorms.runs.tracking.tracker import Tracker, numbers
from fednorms.runs.tracking.tracking import asked_for
from tests.runs.test_compare import small

QUICK = {"rounds": 2, "batch_size": 6, "lr": 0.1}


def stop_after(rounds):
    def callback(event):
        if event.round == rounds:
            raise KeyboardInterrupt

    return callback


def expected(result, name):
    """A curve as the result has it: (round, number) from round 1."""
    rows = [(row["round"], numbers(row, result.tested(row["round"]))) for row in result.history]
    return [(t, values[name]) for t, values in rows if name in values]


def curves(folder):
    """All curves of TensorBoard's event files, and the recipe."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(folder))
    read.Reload()
    tags = read.Tags()
    recipe = read.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags["scalars"]}, recipe


def same(found, wanted):
    return [t for t, _ in found] == [t for t, _ in wanted] and [v for _, v in found] == pytest.approx(
        [v for _, v in wanted], rel=1e-6
    )


def test_tensorboard_has_every_round_from_1_every_site_and_the_recipe(tmp_path):
    pytest.importorskip("tensorboard")
    result = fn.run("fedbn", small(unseen=True), out=tmp_path / "run", track=["tensorboard"], **QUICK)
    found, recipe = curves(tmp_path / "run" / "tensorboard")
    assert result.notes == []
    assert {"train/loss", "cost/bytes_up", "cost/bytes_down", "cost/seconds", "train/lr"} < set(found)
    assert {"personal/own/test/accuracy", "personal/own/test/site/east", "personal/own/val/site/west"} < set(found)
    assert "epsilon" not in found
    for name, curve in found.items():
        assert [t for t, _ in curve] == [1, 2]
        assert same(curve, expected(result, name)), name
    assert result.recipe.to_toml().strip() in recipe


def test_epsilon_is_tracked(tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("dp_accounting")
    result = fn.run("dpcentral(noise=2.0)", small(), out=tmp_path / "run", track="tensorboard", **QUICK)
    assert same(
        curves(tmp_path / "run" / "tensorboard")[0]["epsilon"], [(r["round"], r["epsilon"]) for r in result.history]
    )


def test_a_resumed_run_continues_its_curves_without_repeating_a_round(tmp_path):
    pytest.importorskip("tensorboard")
    recipe = fn.Recipe(checkpoint_every=2, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        fn.run("fedavg", small(), recipe=recipe, out=tmp_path / "run", track="tensorboard", callback=stop_after(3))
    result = fn.resume(tmp_path / "run", federation=small(), track="tensorboard")
    found, _ = curves(tmp_path / "run" / "tensorboard")
    assert same(found["train/loss"], expected(result, "train/loss"))
    assert [t for t, _ in found["train/loss"]] == [1, 2, 3, 4]


def test_a_comparison_tracks_each_run_under_its_own_name(tmp_path):
    pytest.importorskip("tensorboard")
    compared = fn.compare(["fedavg", "fedbn"], small(), seeds=1, out=tmp_path, track="tensorboard", **QUICK)
    for row in compared.rows:
        found, recipe = curves(tmp_path / "tensorboard" / f"{row.label}-0")
        last = dict(found[f"{row.mode}/test/site/east"])[2]
        assert last == pytest.approx(row.entries["east"].mean)
        assert f'method = "{compared.methods[row.label]}"' in recipe


def test_a_run_without_a_directory_is_tracked_in_the_working_directory(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        fn.run("fedavg", small(), track="tensorboard", **QUICK)
    folders = sorted((tmp_path / "runs" / "tensorboard").iterdir())
    assert len(folders) == 2  # the second run does not draw over the first
    assert all(len(curves(folder)[0]["train/loss"]) == 2 for folder in folders)


def test_wandb_offline_has_every_round(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = fn.run("fedavg", small(), out=tmp_path / "run", track=["wandb"], **QUICK)
    wandb.teardown()  # its process writes the file, and may do so later
    assert result.notes == []
    [file] = tmp_path.glob("run/wandb/offline-run-*/run-*.wandb")
    store, history, config = DataStore(), [], {}
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        for update in record.run.config.update:
            config[update.key] = json.loads(update.value_json)
    store.close()
    assert [(row["round"], row["train/loss"]) for row in history] == expected(result, "train/loss")
    assert history[-1]["global/global/test/site/east"] == result.scores().sites["east"].accuracy
    assert config["method"] == "fedavg"
    assert json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"] in file.name


@pytest.mark.filterwarnings("ignore::FutureWarning")  # MLflow's, about where it stores things
def test_mlflow_has_every_round_and_continues_a_resumed_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with pytest.raises(KeyboardInterrupt):
        fn.run("fedavg", small(), out=tmp_path / "run", track="mlflow", callback=stop_after(1), **QUICK)
    result = fn.resume(tmp_path / "run", federation=small(), track="mlflow")
    assert result.notes == []
    client = mlflow.MlflowClient()
    [experiment] = [e for e in client.search_experiments() if e.name == "fednorms"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.lr"] == "0.1"
    for name in ("train/loss", "global/global/test/site/east"):
        found = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        assert sorted(found) == expected(result, name)
    assert [f.path for f in client.list_artifacts(run.info.run_id)] == ["recipe.toml"]


class Failing(Tracker):
    """Fails where it is told to, and counts what it is asked."""

    def __init__(self, where):
        self.where, self.calls = where, []

    def call(self, what):
        self.calls.append(what)
        if what == self.where:
            raise OSError("the disk\nis full")

    def begin(self, run, first):
        self.call("begin")

    def log(self, t, values):
        self.call(f"log {t}")

    def end(self, *, finished):
        self.call("end" if finished else "cut short")


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("begin", ["begin"]),
        ("log 2", ["begin", "log 1", "log 2"]),
        ("end", ["begin", "log 1", "log 2", "log 3", "end"]),
        ("nowhere", ["begin", "log 1", "log 2", "log 3", "end"]),
    ],
)
def test_a_tracker_that_fails_is_a_note_and_the_run_is_the_same(where, calls, monkeypatch):
    failing = Failing(where)
    monkeypatch.setattr(module, "made", lambda name: failing)
    plain = fn.run("fedavg", small(), rounds=3)
    tracked = fn.run("fedavg", small(), rounds=3, track="tensorboard")
    assert failing.calls == calls
    assert tracked.accuracy == plain.accuracy
    said = "tensorboard stopped tracking fedavg-small-0: OSError: the disk is full"
    assert tracked.notes == ([] if where == "nowhere" else [said])


def test_an_interrupted_run_is_closed_as_cut_short(monkeypatch):
    failing = Failing("nowhere")
    monkeypatch.setattr(module, "made", lambda name: failing)
    with pytest.raises(KeyboardInterrupt):
        fn.run("fedavg", small(), rounds=2, track="tensorboard", callback=stop_after(1))
    assert failing.calls == ["begin", "log 1", "cut short"]


def test_mistakes_are_errors_before_anything_trains(tmp_path, monkeypatch):
    for call in (fn.run, lambda *args, **options: fn.compare(["fedavg"], **options)):
        with pytest.raises(fn.BadInput, match=r'track= has no tracker "tensorbord": did you mean "?tensorboard'):
            call("fedavg", federation=small(), out=tmp_path / "run", track=["tensorbord"], **QUICK)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(fn.BadInput, match=r"needs the package mlflow-skinny. .*'fednorms\[mlflow\]'"):
        fn.run("fedavg", small(), out=tmp_path / "run", track="mlflow", **QUICK)
    assert not (tmp_path / "run").exists()
    assert asked_for(()) == []


def test_track_on_the_command_line(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from fednorms.cli import main

    out = tmp_path / "run"
    assert (
        main(["run", "--method", "fedavg", "--rounds", "1", "--out", str(out), "--track", "tensorboard", "--quiet"])
        == 0
    )
    assert [t for t, _ in curves(out / "tensorboard")[0]["train/loss"]] == [1]
    assert (
        main(["compare", "--methods", "fedavg", "--seeds", "1", "--out", str(tmp_path / "c"), "--track", "board"]) == 2
    )
    assert '--track has no tracker "board"' in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
