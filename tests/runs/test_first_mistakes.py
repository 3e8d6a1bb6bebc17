"""What newcomers get wrong in Python: one message each, in the words of Python, with what to write instead."""

from __future__ import annotations

import inspect
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fednorms as fn
from fednorms.core.option_names import command_line

SMALL = "digits-dials(clients=2)"
X, Y = np.zeros((10, 8, 8, 3), np.uint8), np.arange(10) % 2


def run(method="fedavg", federation="digits-shift", **options):
    return fn.run(method, federation, **{"rounds": 1, **options})


class Three(nn.Module):
    """A network with three outputs."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(x.mean((2, 3)))


MISTAKES = {
    "rounds in words": (lambda: run(rounds="ten"), 'rounds= must be a whole number, got "ten".'),
    "no rounds": (lambda: run(rounds=0), "rounds= must be >= 1, got 0."),
    "half a round": (lambda: run(rounds=1.5), "rounds= must be a whole number, got 1.5."),
    "several rates": (lambda: run(lr=[0.1, 0.2]), "lr= must be a number, got [0.1, 0.2]."),
    "an empty batch": (lambda: run(batch_size=0), "batch_size= must be an integer >= 1, got 0."),
    "a seed in words": (lambda: run(seed="a"), 'seed= must be a whole number, got "a".'),
    "an unknown weighting": (lambda: run(weighting="sizes"), '"size" or "uniform", got "sizes"; did you mean "size"?'),
    "one mode": (lambda: run(evaluate="global"), 'evaluate= must be a list, as in ["global"], got "global".'),
    "a number as participation": (lambda: run(participation=0.5), '"fixed:0.1" or "bernoulli:0.4", got 0.5.'),
    "an optimizer object": (
        lambda: run(optimizer=torch.optim.SGD(Three().parameters(), lr=0.1)),
        "got an object. Write optimizer=SGD:",
    ),
    "two methods": (lambda: run(["fedavg", "fedbn"]), 'write fednorms.compare(["fedavg", "fedbn"]).'),
    "arguments in the wrong order": (lambda: run("digits-shift", "fedavg"), "The method comes first"),
    "a federation as the method": (lambda: run(fn.federation("digits-shift")), "got a Federation. The method comes"),
    "added text": (lambda: fn.method("fedbn") + "scaffold", 'Write fednorms.method("fedbn + scaffold").'),
    "arrays as the federation": (lambda: run(federation={"a": (X, Y)}), "write fednorms.from_arrays("),
    "a number as the federation": (lambda: run(federation=5), 'a folder or a Federation, got "int".'),
    "a folder that is not there": (lambda: run(federation="not/there"), 'has no folder "not".'),
    "no folder": (lambda: fn.from_folders(None), "root must be a folder, got None."),
    "a list of sites": (lambda: fn.from_arrays([(X, Y)]), "expected a dictionary of sites, got list."),
    "names as labels": (lambda: fn.from_arrays({"a": (X, ["cat"] * 10)}), "Number them, and name them with classes=."),
    "a model for other classes": (lambda: run(model=Three()), 'Model "Three" returns outputs of shape (2, 3)'),
    "a file as the recipe": (lambda: run(recipe="x.toml"), 'fednorms.Recipe.read("x.toml")'),
    "a dictionary as training": (lambda: run(training={"lr": 1}), "training= must be fednorms.Training(...), got"),
    "a callback that is a number": (lambda: run(callback=3), "callback= must be a function that takes a RoundEvent"),
    "a misspelled key": (lambda: fn.Recipe(metod="fedavg"), 'unknown key "metod": did you mean "method"?'),
    "a rate in words": (lambda: fn.Training(lr="fast"), 'lr= must be a number, got "fast".'),
    "seeds in words": (lambda: fn.compare(["fedavg"], seeds="three"), 'list of different integers, got "three".'),
    "rates of a comparison": (lambda: fn.compare(["fedavg"], lr=[0.1]), "lr= must be a number, got [0.1]."),
    "batches of a comparison": (lambda: fn.compare(["fedavg"], batch_size="x"), "batch_size= must be a whole number"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_is_explained(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(fn.BadInput, match=re.escape(words)) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert "the recipe:" not in str(caught.value)


# What each function needs before it looks at its path. "RUN" is a stored run.
PATHS = {
    "adapt path": lambda: fn.adapt(3, "images"),
    "adapt folder": lambda: fn.adapt("RUN", 3),
    "adapt out": lambda: fn.adapt("RUN", "images", out=3),
    "advise federation": lambda: fn.advise(3),
    "advise out": lambda: fn.advise(SMALL, minutes=0, out=3),
    "analyze path": lambda: fn.analyze(3, "drift"),
    "check federation": lambda: fn.check(3),
    "check cache": lambda: fn.check("images", cache=3),
    "compare federation": lambda: fn.compare(["fedavg"], 3),
    "compare out": lambda: fn.compare(["fedavg"], out=3),
    "evaluate_run path": lambda: fn.evaluate_run(3),
    "export path": lambda: fn.export(3, "model"),
    "export out": lambda: fn.export("RUN", 3),
    "federation spec": lambda: fn.federation(3),
    "federation root": lambda: fn.federation("pacs", root=3),
    "from_folders root": lambda: fn.from_folders(3),
    "from_folders cache": lambda: fn.from_folders("images", cache=3),
    "judge path": lambda: fn.judge(3),
    "judge data": lambda: fn.judge("RUN", 3),
    "load_model folder": lambda: fn.load_model(3),
    "open_run path": lambda: fn.open_run(3),
    "partition by": lambda: fn.partition(fn.federation("digits-shift", size=8), 3),
    "predict path": lambda: fn.predict(3, "images"),
    "predict inputs": lambda: fn.predict("RUN", 3),
    "report what": lambda: fn.report(3),
    "report out": lambda: fn.report("RUN", 3),
    "reproduce name": lambda: fn.reproduce(3),
    "reproduce data": lambda: fn.reproduce("fedwon-table-1", 3),
    "reproduce out": lambda: fn.reproduce("fedwon-table-1", "images", out=3),
    "reproduce weights": lambda: fn.reproduce("fedwon-table-1", "images", weights={"resnet18": 3}),
    "resume path": lambda: fn.resume(3),
    "run federation": lambda: fn.run("fedavg", 3),
    "run out": lambda: fn.run(rounds=1, out=3),
    "tune federation": lambda: fn.tune("fedavg", 3),
    "tune out": lambda: fn.tune("fedavg", SMALL, out=3),
    "verify path": lambda: fn.verify(3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a run and some images."""
    place = tmp_path_factory.mktemp("work")
    fn.run("fedavg", fn.federation("digits-shift", size=8), rounds=1, out=place / "RUN")
    for name in ("a/x", "a/y", "b/x", "b/y"):
        (place / "images" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(place / "images" / name / f"{i}.png")
    return place


def test_every_path_of_a_public_function_is_tried():
    functions = {name: f for name in fn.__all__ if inspect.isfunction(f := getattr(fn, name))}
    assert PATHS.keys() == {
        f"{name} {p.name}"
        for name, f in functions.items()
        for p in inspect.signature(f).parameters.values()
        if "Path" in str(p.annotation)
    }


@pytest.mark.parametrize("mistake", PATHS)
def test_a_path_that_is_a_number_is_named(mistake, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(fn.BadInput, match=r"\b(int|3)\b"):
        PATHS[mistake]()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("given", ["first", "runs", "./runs/"])
def test_a_run_that_may_have_been_meant_is_named(given, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "RUN", tmp_path / "runs" / "first")
    with pytest.raises(fn.BadInput, match=re.escape('Did you mean "runs/first"?')):
        fn.open_run(given)
    with pytest.raises(fn.BadInput, match=r"directory\)\.$"):
        fn.open_run("second")


def test_a_path_may_start_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = fn.run("fedavg", fn.federation("digits-shift", size=8), rounds=1, out="~/runs/first")
    assert result.path == tmp_path / "runs" / "first"
    assert fn.resume("~/runs/first").rounds == 1
    assert not (tmp_path / "~").exists()


def test_a_file_is_named_and_its_keys_are_those_of_the_file():
    with pytest.raises(
        fn.BadInput, match=r'^x.toml: rounds must be >= 1, got 0; training.lr must be a number, got "a".$'
    ):
        fn.Recipe.from_toml('rounds = 0\n[training]\nlr = "a"', "x.toml")
    with pytest.raises(fn.BadInput, match=r"^x.toml: batch_size must be an integer >= 1, got 0.$"):
        fn.Recipe.from_toml("[training]\nbatch_size = 0", "x.toml")


def test_on_the_command_line_keys_are_options():
    with command_line(), pytest.raises(fn.BadInput, match=r"^--batch-size must be an integer >= 1, got 0.$"):
        fn.Recipe.make({"training": {"batch_size": 0}})
    with command_line(), pytest.raises(fn.BadInput, match=r'^--data-seed must be a whole number, got "a".$'):
        fn.Recipe.make({"data": {"seed": "a"}})
