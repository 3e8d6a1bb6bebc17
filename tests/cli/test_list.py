"""`fednorms list`: the stored index equals the code, rows are chosen, and nothing heavy is imported."""

from __future__ import annotations

import json
import re

import pytest

from fednorms.cli import index, main
from fednorms.methods.registry import names
from tests.cli.test_imports import answered

WHAT = ("methods", "models", "federations", "partitions", "transforms", "analyses")


def listed(capsys, *args):
    assert main(["list", *args, "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    return [row["name"] for row in rows]


def test_the_stored_index_is_what_the_code_says():
    assert index.text() == index.FILE.read_text(encoding="utf-8"), "run: make index"


def test_lists_import_nothing_heavy():
    codes, heavy = answered(*(["list", what] for what in WHAT), ["list", "methods", "--costs"])
    assert set(codes) == {0}
    assert heavy == set()


def test_every_method_is_listed_with_idea_and_paper(capsys):
    assert main(["list", "methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["methods"]
    assert {row["name"] for row in rows} == {name for name in names() if index.is_ours(name)}
    assert all(row["idea"] and row["paper"] for row in rows)
    assert next(row for row in rows if row["name"] == "fedprox")["options"].startswith("mu=0.001")


def test_all_methods_fit_one_screen_in_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["list", "methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    shown = re.findall(r"[a-z]\w*", " ".join(lines[1:-4]))
    ours = [name for name in names() if index.is_ours(name)]
    assert all(shown.count(name) == 1 for name in ours)
    assert "Add mu/2" not in " ".join(lines)
    assert main(["list", "methods", "--ideas"]) == 0
    assert "Add mu/2" in capsys.readouterr().out


def test_a_pattern_chooses_rows_by_text_or_by_name(capsys):
    assert "fedprox" in listed(capsys, "methods", "PROX")
    assert "scaffold" in listed(capsys, "methods", "Karimireddy")  # of its paper
    assert all(name.startswith("fed") for name in listed(capsys, "methods", "fed*"))
    assert listed(capsys, "methods", "fedb?") == ["fedbn"]
    assert set(listed(capsys, "models", "resnet18*")) == {"resnet18-cifar", "resnet18-cifar-untracked"}
    assert main(["list", "methods", "nosuchthing"]) == 2
    assert 'No methods match "nosuchthing"' in capsys.readouterr().err


def test_a_paper_chooses_the_methods_of_its_tables(capsys):
    found = listed(capsys, "methods", "--paper", "FedWon")
    assert {"fedwon", "fedbn", "silobn", "fixbn"} <= set(found)
    assert "fednn" not in found
    assert listed(capsys, "methods", "bn", "--paper", "fedwon")[0] in found
    assert main(["list", "methods", "--paper", "fedwan"]) == 2
    assert 'did you mean "fedwon"' in capsys.readouterr().err
    assert main(["list", "models", "--paper", "fedwon"]) == 2
    assert "is for methods" in capsys.readouterr().err


@pytest.mark.parametrize("what", WHAT)
def test_every_list_prints(capsys, what):
    assert main(["list", what]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 4
