"""`fednorms reproduce` in its own process: interrupted and continued, lists, and one message for every mistake."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fednorms.cli import main
from tests.cli.conftest import fednorms, held
from tests.support.tables import MINI, fails_while_running, results, stored, table
from tests.support.waiting import HANG


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupted_and_continued_by_the_same_command(tmp_path):
    folder = table(tmp_path / "mini", change=("rounds = 2", "rounds = 20"))
    out = tmp_path / "out"
    command = ["reproduce", folder, "--out", out, "--seeds", "1", "--device", "cpu"]
    with held(*command, run=out / "runs/shift/fedbn/seed-0", number=1) as process:  # the first run is stored
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert "runs finished; continue with the same command" in err
    assert "Traceback" not in err
    assert "2 runs: 0 finished, 2 to go" in err
    assert "About " in err  # the time it will take
    first = (out / "results/shift/fedavg/seed-0.json").read_bytes()
    assert (out / "RESULTS.md").exists()

    said = fednorms(*command, "--jobs", "2")  # now with worker processes
    assert said.code == 0, said.err
    assert results(out)["shift", "FedAvg", 0] == json.loads(first)
    assert "Digits that look different" in said.out
    assert "of 2 published cells are within 3 points" in said.out
    assert '"pictures" is skipped: it needs pacs' in said.err
    assert main([*map(str, command[:2]), "--out", str(tmp_path / "alone" / "out"), *command[4:], "--quiet"]) == 0
    assert stored(out) == stored(tmp_path / "alone" / "out")  # interrupted or not, one process or several


def test_json_is_one_object_with_every_cell(tmp_path, capsys):
    folder = table(tmp_path / "mini")
    args = ["reproduce", str(folder), "--out", str(tmp_path / "out"), "--only", "FedBN", "--json", "--device", "cpu"]
    assert main(args) == 0
    said = capsys.readouterr()
    assert not said.err
    found = json.loads(said.out)
    cell = found["settings"][0]["rows"]["FedBN"]["Avg"]
    assert cell["published"] == 0.1
    assert cell["difference"] == pytest.approx(cell["ours"] - 0.1)
    assert cell["verdict"] == "better"
    assert found["settings"][0]["rows"]["FedAvg"]["Avg"]["ours"] is None
    assert (found["within"], found["judged"], found["ran"]) == (1, 1, 1)
    assert found["skipped"] == {"pictures": "pacs"}
    names = [Path(file).name for file in found["files"]]
    assert names == ["RESULTS.md", "results.csv", "results.png", "report.html"]


def test_a_failed_run_is_exit_code_1_and_the_table_is_still_written(tmp_path, capsys, monkeypatch):
    folder = table(tmp_path / "mini")
    fails_while_running(monkeypatch)
    assert main(["reproduce", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert "shift / FedBN, seed 0 failed: " in said.out
    assert "FedAvg" in said.out
    assert (tmp_path / "out" / "RESULTS.md").exists()


def test_a_failed_run_of_a_search_is_exit_code_1(tmp_path, capsys, monkeypatch):
    searched = 'method = "fedbn"\nsearch = { "training.lr" = [0.1, 0.2] }'
    folder = table(tmp_path / "mini", change=('method = "fedbn"', searched))
    fails_while_running(monkeypatch)
    args = ["reproduce", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", "--only", "FedBN"]
    for more in ([], ["--search"]):
        assert main([*args, *more]) == 1
        said = capsys.readouterr()
        assert "shift / FedBN, lr 0.1, seed 0 failed: " in said.out
        assert "shift / FedBN, lr 0.2, seed 0 failed: " in said.out


def test_rows_that_can_never_run_are_named_together_before_the_first_run(tmp_path, capsys):
    rows = """
[[rows]]
name = "Nothing to keep"
method = "gn + fedbn"

[[rows]]
name = "Weights"
method = "fedavg"
recipe.class_weights = [1.0]
search = { "training.lr" = [0.1, 0.2] }
"""
    folder = table(tmp_path / "mini", text=MINI + rows)
    for more in ([], ["--jobs", "2"]):
        assert main(["reproduce", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", *more]) == 2
        said = capsys.readouterr()
        assert not said.out
        assert "nothing was started" in said.err
        assert "shift / Nothing to keep: fedbn has nothing to act on" in said.err
        assert said.err.count("shift / Weights: class_weights") == 1
        assert not (tmp_path / "out").exists()
    args = ["--only", "FedAvg", "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]
    assert main(["reproduce", str(folder), *args]) == 0


def test_a_run_of_a_search_that_diverges_is_not_reported_as_failed(tmp_path, capsys):
    wild = 'method = "nonorm"\nsearch = { "training.lr" = [1e30, 1e31] }'
    folder = table(tmp_path / "mini", change=('method = "fedbn"', wild))
    args = ["reproduce", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", "--only", "FedBN", "--search"]
    assert main(args) == 0
    said = "".join(capsys.readouterr())
    assert "shift / FedBN, lr 1e+30, seed 0 diverged: Client " in said
    assert "failed" not in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--list"),
        (["no-such-table"], 'No table "no-such-table"'),
        (["TABLE", "--only", "FedBM"], 'did you mean "FedBN"'),
        (["TABLE", "--settings", "shfit"], 'did you mean "shift"'),
        (["TABLE", "--settings", "pictures"], "--data ROOT"),
        (["TABLE", "--data", "/no/such/folder"], "no such folder"),
        (["TABLE", "--device", "tpu"], "not available"),
        (["TABLE", "--jobs", "0"], "jobs must be an integer >= 1, got 0"),
        (["TABLE", "--seeds", "0"], "seeds must be an integer >= 1, got 0"),
        (["TABLE", "--seeds", "-1"], "seeds must be an integer >= 1, got -1"),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_message(tmp_path, capsys, args, words):
    folder = table(tmp_path / "mini")
    given = [str(folder) if a == "TABLE" else a for a in args]
    assert main(["reproduce", *given, *(["--out", str(tmp_path / "out")] if args else [])]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert words in said.err
    assert "Traceback" not in said.err


def test_the_list_shows_every_table_and_what_has_run(tmp_path, capsys, monkeypatch):
    from fednorms.papers.tables import catalog

    (tmp_path / "recipes/own").mkdir(parents=True)
    (tmp_path / "recipes/own/table-2.toml").write_text(MINI)
    (tmp_path / "recipes/own/table-11.toml").write_text(MINI.replace("Mini", "Maxi"))
    monkeypatch.setattr(catalog, "home", lambda: tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "own-table-2", "--quiet", "--device", "cpu", "--only", "FedAvg"]) == 0
    capsys.readouterr()
    assert main(["reproduce", "--list", "--json"]) == 0
    two, eleven = json.loads(capsys.readouterr().out)["tables"]
    assert (two["name"], eleven["name"], eleven["label"]) == ("own-table-2", "own-table-11", "Maxi")
    assert two["data"] == eleven["data"] == ["none", "pacs"]
    assert (two["runs"], two["done"], two["where"]) == (4, 1, os.path.join("runs", "reproduce-own-table-2"))
    assert (eleven["runs"], eleven["done"]) == (4, 0)
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    assert "own-table-11" in out
    assert "pacs" in out
