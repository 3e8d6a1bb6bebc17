"""A run directory from a stranger reaches no file outside of it, and commands that only read write nothing."""

from __future__ import annotations

import os

import pytest

import fednorms as fn
from fednorms.core.errors import BadInput, RunFailed
from fednorms.runs.store.directory import RunDirectory

RECIPE = 'method = "fedavg"\nrounds = 3\n'


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(RECIPE, resume=False)
    return directory


@pytest.fixture
def outside(tmp_path):
    target = tmp_path / "outside"
    target.mkdir()
    (target / "precious").write_text("precious")
    return target


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "summary.json", "federation.json", "checkpoints", "spill"])
def test_no_link_out_of_a_run_is_followed(run, outside, name):
    folder = name in ("checkpoints", "spill")
    (run.path / name).symlink_to(outside if folder else outside / "precious")
    for use in (run.read_recipe, run.lock().__enter__):
        with pytest.raises(BadInput, match=rf"{name} is a link to .*outside of .*run\. .*replace the link"):
            use()
    assert [p.name for p in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "precious"


def test_resuming_a_received_run_leaves_the_file_behind_its_lock_alone(run, outside):
    (run.path / ".lock").symlink_to(outside / "precious")
    with pytest.raises(BadInput, match="is a link to"):
        fn.resume(run.path)
    assert (outside / "precious").read_text() == "precious"


def test_a_link_deep_inside_or_to_nothing_is_found_too(run, outside):
    deep = run.checkpoints / "round-000001"
    deep.mkdir(parents=True)
    (deep / "manifest.json").symlink_to("../../../outside/not there")
    with pytest.raises(BadInput, match=r"manifest\.json is a link to"):
        run.read_recipe()


def test_links_inside_and_to_the_whole_directory_are_fine_but_nothing_is_written_through_them(run, tmp_path):
    (tmp_path / "elsewhere").symlink_to(run.path)
    assert RunDirectory(tmp_path / "elsewhere").read_recipe() == RECIPE
    run.metrics_path.symlink_to("recipe.toml")
    assert run.read_recipe() == RECIPE
    with pytest.raises(RunFailed, match=r"Cannot write .*metrics\.jsonl"):
        run.append_metrics({"round": 1})
    assert run.read_recipe() == RECIPE


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_instead_of_waiting_for_it(run):
    os.mkfifo(run.summary_path)
    with pytest.raises(BadInput, match=r"summary\.json is neither a file nor a folder"):
        run.read_recipe()


def test_using_a_run_writes_nothing_into_it(tmp_path):
    fn.run("fedbn", "digits-shift", model="cnn-small", rounds=1, out=tmp_path / "run")

    def state():
        return {
            p: (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in [tmp_path / "run", *(tmp_path / "run").rglob("*")]
        }

    before = state()
    fn.evaluate_run(tmp_path / "run")
    fn.export(tmp_path / "run", tmp_path / "model", site="clean")
    fn.open_run(tmp_path / "run", which="best")
    assert state() == before
