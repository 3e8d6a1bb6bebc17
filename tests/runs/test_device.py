"""`device="auto"`: a GPU if there is one, recorded as what it became; a run that is continued stays where it began."""

from __future__ import annotations

import pytest
import torch

import fednorms as fn
from fednorms.cli import main
from fednorms.engines import devices
from fednorms.runs import device as choice
from fednorms.runs.device import device_of, own_device, unused_gpu
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.directory import RunDirectory

QUICK = {"rounds": 1, "recipe": Recipe(data={"size": 8}, training={"steps": 1})}


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_auto_is_the_default_and_is_recorded_as_what_it_became(tmp_path, no_gpu):
    assert Recipe().device == "auto"
    assert fn.run("fedavg", **QUICK, out=tmp_path / "r").recipe.device == "cpu"
    assert 'device = "cpu"' in RunDirectory(tmp_path / "r").read_recipe()


def test_auto_is_a_gpu_where_there_is_one(gpu):
    assert Recipe().resolved().device == "cuda"
    assert Recipe(device="cpu").resolved().device == "cpu"


def test_a_recorded_recipe_without_a_device_is_one_of_the_cpu():
    recorded = "\n".join(line for line in Recipe(device="cpu").to_toml().splitlines() if "device" not in line)
    assert Recipe.from_toml(recorded).device == "cpu"
    assert Recipe.from_toml('method = "fedbn"').device == "auto"  # written by hand


def test_the_same_command_continues_a_run_on_its_device(tmp_path, no_gpu, monkeypatch):
    first = fn.run("fedavg", **QUICK, out=tmp_path / "r")
    fn.compare(["fedavg"], seeds=1, **QUICK, out=tmp_path / "c")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU has been built in
    assert fn.run("fedavg", **QUICK, out=tmp_path / "r").accuracy == first.accuracy
    assert fn.compare(["fedavg"], seeds=1, **QUICK, out=tmp_path / "c").outcomes[0].status == "done"
    assert device_of("auto", [RunDirectory(tmp_path / "other")]) == "auto"
    assert device_of("cuda", [RunDirectory(tmp_path / "r")]) == "cuda"  # asked for: another run


def test_a_run_of_a_gpu_that_is_gone_is_not_continued_elsewhere(tmp_path, no_gpu):
    (tmp_path / "recipe.toml").write_text(Recipe(device="cuda").to_toml())
    assert device_of("auto", [RunDirectory(tmp_path)]) == "auto"


def test_a_trained_model_is_used_on_the_runs_own_device(gpu, monkeypatch):
    assert own_device("auto", "cpu") == "cpu"  # the scores are those that the run recorded
    assert own_device("auto", "cuda:1") == "cuda"
    assert own_device("cuda", "cpu") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device("auto", "cuda") == "cpu"
    with pytest.raises(fn.BadInput, match="not available"):
        own_device("cuda", "cuda")


class _There:
    def __init__(self, path):
        self.path = path

    def exists(self):
        return self.path == "/dev/nvidia0"


def test_a_note_says_why_a_gpu_is_not_used(no_gpu, monkeypatch):
    assert unused_gpu("auto") == "" or not choice.Path("/dev/nvidia0").exists()
    monkeypatch.setattr(choice, "Path", _There)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in unused_gpu("auto")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides it" in unused_gpu("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "driver may be too old" in unused_gpu("auto")
    assert unused_gpu("cpu") == ""  # asked for
    assert any("although there is a GPU" in note for note in fn.run("fedavg", **QUICK).notes)
    assert not any("GPU" in note for note in fn.run("fedavg", **QUICK, device="cpu").notes)
    assert any("although there is a GPU" in note for note in fn.compare(["fedavg"], seeds=1, **QUICK).notes)


def test_evaluate_and_predict_take_a_device(tmp_path, no_gpu, capsys):
    fn.run("fedavg", **QUICK, out=tmp_path / "r")
    assert main(["evaluate", str(tmp_path / "r"), "--device", "cpu"]) == 0
    assert main(["evaluate", str(tmp_path / "r"), "--device", "cuda"]) == 2
    assert 'Device "cuda" is not available' in capsys.readouterr().err
    assert devices.pick_device("auto") == "cpu"
