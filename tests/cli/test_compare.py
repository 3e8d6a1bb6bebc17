"""`fednorms compare` in its own process: the files it writes, and continuing after an interruption."""

from __future__ import annotations

import csv
import json
import os
import signal

import pytest

import fednorms as fn
from fednorms.cli import main
from tests.cli.conftest import fednorms, held
from tests.support.waiting import HANG

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def test_interrupted_and_continued_by_the_same_command(folder, tmp_path):
    out = tmp_path / "table"
    command = ["compare", "--methods", "fedavg", "fedbn", "--seeds", "2", "--rounds", "25", "--federation", folder]
    command += ["--batch-size", "4", "--lrs", "fedbn=0.1", "--out", out]
    with held(*command, run=out / "fedavg-1", number=1) as process:  # the first of four runs has ended
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert "with the same command" in err
    assert "Traceback" not in err
    before = (out / "fedavg-0" / "metrics.jsonl").read_bytes()

    said = fednorms(*command, "--json", "--jobs", "2")  # now with worker processes
    assert said.code == 0, said.err
    assert (out / "fedavg-0" / "metrics.jsonl").read_bytes() == before  # a finished run is not repeated
    assert said.json["seeds"] == [0, 1]
    assert [row["method"] for row in said.json["rows"]] == ["fedavg", "fedbn"]
    assert [row["lr"] for row in said.json["rows"]] == [0.05, 0.1]
    assert said.json["best"] in ("fedavg", "fedbn")
    alone = fn.compare(["fedavg", "fedbn"], folder, rounds=25, seeds=2, batch_size=4, lr={"fedbn": 0.1})
    assert alone.to_dict()["rows"] == said.json["rows"]  # interrupted or not, one process or several
    assert json.loads((out / "comparison.json").read_text())["rows"] == said.json["rows"]
    table = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert [row["method"] for row in table] == ["fedavg", "fedbn"]
    assert table[1]["mode"] == "personal/own"
    text = (out / "comparison.md").read_text()
    assert "| fedbn | personal/own | 0.1 |" in text
    assert "\\*" in text
    assert "torch" in text
    assert "last round" in text
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_is_exit_code_1_and_the_table_is_still_written(folder, tmp_path, capsys):
    command = ["compare", "--methods", "fedavg", "nonorm", "--lrs", "nonorm=1e30", "--seeds", "1", "--rounds", "2"]
    assert main([*command, "--federation", str(folder), "--batch-size", "4", "--out", str(tmp_path / "t")]) == 1
    said = capsys.readouterr()
    assert "failed" in said.out
    assert "nonorm, seed 0 failed: Client" in said.out
    assert (tmp_path / "t" / "comparison.md").exists()
