"""A figure's analysis: computed for every run, stored with its result, and shown in the report."""

from __future__ import annotations

import csv
import json

import pytest

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.papers.analysis import measures
from tests.support.tables import results, table

ANALYSED = ("tolerance = 3.0", 'tolerance = 3.0\nanalysis = "divergence"')


def made(folder, analysis=ANALYSED, **options):
    settings = {"settings": ["shift"], "only": ["FedAvg"], "device": "cpu"} | options
    return fn.reproduce(table(folder / "mini", change=analysis), out=folder / "out", **settings)


def test_every_run_is_analysed_and_the_report_shows_what_was_found(tmp_path):
    done = made(tmp_path, seeds=2)
    out = tmp_path / "out"
    stored = [results(out)["shift", "FedAvg", seed] for seed in (0, 1)]
    numbers = [r["analysis"]["scalars"]["mean over pairs"] for r in stored]
    assert numbers[0] != numbers[1]
    text = (out / "RESULTS.md").read_text()
    assert "shows the analysis divergence: " in text
    assert f"| FedAvg | {sum(numbers) / 2:.4g} ± " in text
    assert "](analysis.png)" in text
    assert (out / "analysis.png").read_bytes().startswith(b"\x89PNG")
    assert out / "analysis.png" in done.files
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    [row] = [r for r in rows if r["selector"] == "divergence" and r["column"] == "mean over pairs"]
    assert float(row["ours"]) == pytest.approx(sum(numbers) / 2, abs=1e-4)
    assert done.summary.score == (0, 0)  # such a figure does not show accuracies
    assert not (out / "runs").exists()  # the setting keeps none
    assert made(tmp_path, seeds=2).ran == 0


def test_a_run_whose_analysis_fails_is_kept_and_analysed_next_time(tmp_path, monkeypatch):
    good = measures.ANALYSES["divergence"]

    def broken(kept):
        raise BadInput(f"no luck with {kept.path}")

    monkeypatch.setitem(measures.ANALYSES, "divergence", measures.Analysis(**{**vars(good), "measure": broken}))
    done = made(tmp_path)
    [(name, why)] = done.failed.items()
    assert name == "shift / FedAvg, seed 0"
    assert "its analysis failed: no luck with RUN" in why
    stored = results(tmp_path / "out")["shift", "FedAvg", 0]
    assert stored["status"] == "failed"
    assert str(tmp_path) not in json.dumps({k: v for k, v in stored.items() if k != "recipe"})
    assert (tmp_path / "out/runs/shift/fedavg/seed-0").exists()
    monkeypatch.setitem(measures.ANALYSES, "divergence", good)
    again = made(tmp_path)
    assert not again.failed
    assert "analysis" in results(tmp_path / "out")["shift", "FedAvg", 0]


def test_an_analysis_stays_with_its_table(tmp_path):
    made(tmp_path)
    plain = fn.reproduce(
        table(tmp_path / "mini"), settings=["shift"], only=["FedAvg"], device="cpu", out=tmp_path / "b"
    )
    assert plain.ran == 0  # reused
    assert "analysis" not in results(tmp_path / "b")["shift", "FedAvg", 0]
    assert not (tmp_path / "b/analysis.png").exists()


@pytest.mark.parametrize(
    "before", [("tolerance = 3.0", "tolerance = 3.0"), (ANALYSED[0], 'tolerance = 3.0\nanalysis = "embedding"')]
)
def test_results_without_this_analysis_are_run_again(tmp_path, before):
    made(tmp_path, before)
    done = made(tmp_path)
    assert done.ran == 1
    assert results(tmp_path / "out")["shift", "FedAvg", 0]["analysis"]["name"] == "divergence"


def test_a_run_that_was_kept_is_analysed_without_training_it_again(tmp_path):
    store = ('title = "Digits that', 'store = ["model"]\ntitle = "Digits that')
    folder = table(tmp_path / "mini", change=store)
    fn.reproduce(folder, settings=["shift"], only=["FedAvg"], device="cpu", out=tmp_path / "out")
    metrics = tmp_path / "out/runs/shift/fedavg/seed-0/metrics.jsonl"
    before = metrics.read_bytes()
    folder = table(tmp_path / "mini", change=store, analysis=ANALYSED)
    fn.reproduce(folder, settings=["shift"], only=["FedAvg"], device="cpu", out=tmp_path / "out")
    assert metrics.read_bytes() == before
    assert "analysis" in results(tmp_path / "out")["shift", "FedAvg", 0]


def test_an_error_of_an_analysis_concerns_only_its_run(tmp_path, monkeypatch):
    good = measures.ANALYSES["divergence"]

    def broken(kept):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(measures.ANALYSES, "divergence", measures.Analysis(**{**vars(good), "measure": broken}))
    done = made(tmp_path, only=())
    assert [why.rpartition(": ")[2] for why in done.failed.values()] == ["out of memory"] * 2
    assert (tmp_path / "out/RESULTS.md").exists()


def test_an_unknown_analysis_is_named(tmp_path):
    with pytest.raises(BadInput, match='No analysis "divergense": did you mean "divergence"'):
        made(tmp_path, ("tolerance = 3.0", 'tolerance = 3.0\nanalysis = "divergense"'))
