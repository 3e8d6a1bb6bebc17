"""`tune` and `compare --search lr`."""

import json

import pytest

import fednorms as fn
from fednorms.advice.training import Trainer
from fednorms.advice.tune import tune
from fednorms.cli import main


@pytest.fixture(scope="module")
def data():
    return fn.federation("digits-dials(clients=2)", size=8, val=0.1, test=0.85)


def test_the_best_value_is_that_of_plain_runs(data):
    grid = {"lr": [1e-6, 0.1]}
    tuned = tune("fedprox", data, rounds=2, grid=grid, seeds=1, batch_size=8)
    scores = {lr: fn.run("fedprox", data, rounds=2, lr=lr, batch_size=8).scores(split="val").mean for lr in grid["lr"]}
    assert tuned.values == {"lr": max(scores, key=scores.get)}
    assert tuned.score == max(scores.values())
    assert any("edge" in note for note in tuned.notes)
    assert "fedprox, lr 0.1" in repr(tuned)


def test_options_of_the_method_are_searched(data, tmp_path):
    tuned = tune("fedprox", data, rounds=2, grid={"mu": [0.0, 1e6]}, seeds=1, out=tmp_path / "t")
    assert tuned.tuned_recipe().method == "fedprox(mu=0.0)"
    assert json.loads((tmp_path / "t" / "tuned.json").read_text())["values"] == {"mu": 0.0}
    with pytest.raises(fn.BadInput, match='no option "nu"'):
        tune("fedprox", data, grid={"nu": [1]})


def test_everything_diverging_is_an_error(data):
    with pytest.raises(fn.BadInput, match="smaller learning rates"):
        tune("fedavg", data, rounds=2, grid={"lr": [1e30]}, seeds=1)


@pytest.mark.parametrize("command", [["tune", "fedavg"], ["compare", "--methods", "fedavg", "gn", "--search", "lr"]])
def test_an_interrupted_search_says_how_to_continue(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "play", interrupted)
    assert main([*command, "--federation", "digits-dials(clients=2)", "--size", "8", "--rounds", "2", "--quiet"]) == 130
    assert "Interrupted. Continue with the same command." in capsys.readouterr().err


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--size", "8", "--val", "0.1", "--test", "0.85", "--rounds", "2", "--quiet", "--device", "cpu"]
    dials = "digits-dials(clients=2)"
    given = ["advise", dials, "--budget", "40", "--methods", "fedavg", "gn", "--rates", "0.1", "--seeds", "1", *small]
    assert main([*given, "--batch", "16"]) == 0
    assert "Advice:" in capsys.readouterr().out
    assert main(["tune", "fedavg", "--grid", "lr=0.01,0.1", "--federation", dials, "--seeds", "1", *small]) == 0
    assert "fedavg, lr 0." in capsys.readouterr().out
    search = ["compare", "--methods", "fedavg", "fedbn", "--lrs", "fedavg=0.1", "--search", "lr", "--seeds", "1"]
    assert main([*search, "--federation", dials, *small]) == 0
    text = (tmp_path / "runs" / "compare-digits-dials-clients-2" / "comparison.md").read_text()
    assert "fedavg: lr 0.1 was given, not searched" in text
    assert "fedbn: lr 0." in text
    assert main(["tune", "fedavg", "--grid", "lr"]) == 2
    assert main(["advise", dials, "--budget", "9", "--minutes", "1", *small]) == 2
    assert "--minutes" in capsys.readouterr().err
