"""Reports of published tables and of an advice."""

from __future__ import annotations

import json

import pytest

import fednorms as fn
from fednorms import BadInput
from fednorms.papers.tables.catalog import open_table
from fednorms.papers.tables.stored_summary import stored_summary
from fednorms.reports.advice import advice_page
from fednorms.runs.recipe import Recipe
from tests.support import tables
from tests.support.pages import Read, read_page

SCRIPT = "<script>alert(1)</script>"


def test_stored_results_of_a_paper_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = fn.report("fedwon-table-1")
    assert file.parts == ("runs", "reproduce-fedwon-table-1", "report.html")
    page = read_page(file)
    table = open_table("fedwon-table-1")
    found = stored_summary(table, table.results)
    assert found.verdict in page.text
    section = next(s for s in found.sections if s.shown)
    shown = next(t for t in page.tables if t[0] == ["row", *section.columns])
    assert [row[0] for row in shown[1:]] == list(section.names.values())
    ours = section.rows["FedBN"]["MNIST"]
    cell = next(row for row in shown if row[0] == "FedBN")[1].replace("\N{NO-BREAK SPACE}", " ")
    assert cell.startswith(f"{ours.ours:.1f} ± {ours.std:.1f}")
    assert f"{ours.published.mean:.1f}" in cell


def test_a_table_that_runs_here_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tables.table(tmp_path / "mini", title=("A few digits", SCRIPT))
    done = fn.reproduce(folder, out=tmp_path / "out")
    page = read_page(fn.report(done))
    assert SCRIPT in page.text
    assert "drawn by hand" in page.text  # why a column is not comparable
    with pytest.raises(BadInput, match=r"table\.toml"):
        fn.report(tmp_path / "out")  # the table itself is elsewhere
    with pytest.raises(BadInput, match="No run of table"):
        fn.report(folder)


def test_a_table_has_no_images():
    with pytest.raises(BadInput, match=r"no images.*images=True"):
        fn.report("fedwon-table-1", images=True)


def advice(**changes):
    """An advice between two methods, as `Advice.to_dict` gives it."""
    gap = {"mean": 4.0, "low": -0.5, "high": 8.2, "probability": 0.96, "images": 60, "seeds": 2}
    played = [
        {"arm": arm, "method": arm, "values": {"lr": 0.1}, "seed": seed, "rounds": 4, "score": score, "error": ""}
        | {"curve": [[1, 0.2], [4, score]], "sites": {"east": [20, 30], SCRIPT: [10, 30]}, "seconds": 1.0}
        for arm, score in (("fedbn", 0.5), ("fedavg", 0.46))
        for seed in (0, 1)
    ]
    cost = {"bytes_up": 1000, "bytes_down": 1000, "client_state": 0, "server_state": 0, "passes": 1.0, "unseen": "yes"}
    finalist = {
        "arm": "fedbn",
        "method": "fedbn",
        "values": {"lr": 0.1},
        "mean": 0.5,
        "scores": [0.5, 0.5],
        "rounds": 4,
    }
    values = {
        "kind": "advice",
        "version": "0.2",
        "finished": True,
        "federation": "custom:hospitals",
        "model": "cnn-small",
        "answer": {
            "method": "fedbn",
            "lr": 0.1,
            "verdict": "no difference",
            "sentence": "fedbn has the best score.",
            "runner_up": "fedavg",
            "difference": gap,
            "images": 60,
            "command": "fednorms run advised.toml",
            "cost": "1 kB",
        },
        "question": {},
        "measures": [{"name": "label_tv", "value": 0.1, "says": "label skew", "reveals": "class counts", "parts": {}}],
        "arms": [
            {"name": a, "method": a, "rates": [0.1], "reason": "why", "prior": None, "cost": cost} for a in ("fedbn",)
        ],
        "excluded": {"ditto": SCRIPT},
        "finalists": [
            finalist | {"behind": None},
            finalist | {"arm": "fedavg", "mean": 0.46, "scores": [0.46, 0.46], "behind": gap},
        ],
        "rungs": [{"rounds": 4, "trials": 2, "per_arm": 1, "seeds": [0, 1], "played": played}],
        "curves": {"fedbn, lr 0.1": [[1, 0.2], [4, 0.5]]},
        "budget": {"rounds": 40, "minutes": None, "seconds": None, "jobs": 1},
        "recipe": Recipe().to_dict(),
        "notes": ["a note"],
        "path": None,
        "files": [],
        "retrained": None,
    }
    return values | changes


def test_an_advice_is_reported_from_its_file(tmp_path):
    (tmp_path / "advice.json").write_text(json.dumps(advice()))
    page = read_page(fn.report(tmp_path))
    tried = next(t for t in page.tables if t[0][0] == "method" and "values" in t[0])
    assert [row[0] for row in tried[1:]] == ["fedbn", "fedavg"]
    assert tried[2][5].startswith("-4.0")
    assert "within noise" in tried[2][5]
    assert SCRIPT in page.text
    assert "test images were not read" in page.text
    assert "fednorms run advised.toml" in page.text
    assert 'method = "fedbn"' in page.text  # the recipe that is advised, not the one that was asked with
    assert "lr = 0.1" in page.text


def test_an_advice_on_one_method_claims_no_certainty():
    page = advice_page(advice(answer={**advice()["answer"], "verdict": "clear", "difference": None, "runner_up": None}))
    assert "How sure" not in Read(page.html()).text
    assert "How sure" in Read(advice_page(advice()).html()).text


def test_an_advice_without_a_tournament_is_reported():
    untested = {**advice()["answer"], "verdict": "untested", "difference": None, "runner_up": None}
    page = Read(advice_page(advice(answer=untested, finalists=[], rungs=[], curves={})).html())
    assert "untested" in page.text


def test_a_damaged_advice_is_refused(tmp_path):
    (tmp_path / "advice.json").write_text("[]")
    with pytest.raises(BadInput, match="is not readable"):
        fn.report(tmp_path)
