"""A run that two tables have in common runs once."""

from __future__ import annotations

import json

import pytest

from fednorms.papers.tables.reproduce import reproduce
from tests.papers.tables.test_runs import Heard
from tests.support.tables import results, table


def test_a_run_of_another_table_is_reused(tmp_path):
    one = table(tmp_path / "one")
    two = table(tmp_path / "two", row=('name = "FedBN"\nmethod = "fedbn"', 'name = "FedProx"\nmethod = "fedprox"'))
    reproduce(one, settings=["shift"], out=tmp_path / "out" / "one", device="cpu")
    second = reproduce(two, settings=["shift"], out=tmp_path / "out" / "two", device="cpu")
    assert second.ran == 1  # FedProx; FedAvg has run
    lent, own = (results(tmp_path / "out" / name) for name in ("two", "one"))
    run = ("shift", "FedAvg", 0)
    assert lent[run]["from"] == "one / shift / FedAvg"
    assert lent[run]["table"] == "two"
    assert lent[run]["last"] == own[run]["last"]
    assert reproduce(two, settings=["shift"], out=tmp_path / "out" / "two", device="cpu").ran == 0


def test_a_report_reuses_runs_and_runs_nothing(tmp_path):
    one = table(tmp_path / "one")
    two = table(tmp_path / "two", row=('name = "FedBN"\nmethod = "fedbn"', 'name = "FedProx"\nmethod = "fedprox"'))
    reproduce(one, settings=["shift"], out=tmp_path / "out" / "one", device="cpu")
    second = reproduce(two, settings=["shift"], out=tmp_path / "out" / "two", device="cpu", report=True)
    assert second.ran == 0
    assert [row for _, row, _ in results(tmp_path / "out" / "two")] == ["FedAvg"]
    assert (tmp_path / "out" / "two" / "RESULTS.md").exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"status": "done", "recipe": {}}', '{"status": "done", "recipe": []}', None]
)
def test_a_broken_file_of_another_table_is_named_and_left_out(tmp_path, text):
    one, ears = table(tmp_path / "one"), Heard()
    file = tmp_path / "out/one/results.json"
    if text is None:  # valid, except for what the report needs
        reproduce(one, only=["FedAvg"], out=tmp_path / "out" / "one", device="cpu")
        [values] = results(tmp_path / "out" / "one").values()
        del values["data"]
        text = json.dumps({"runs": [values]})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    done = reproduce(one, only=["FedAvg"], out=tmp_path / "out" / "two", device="cpu", observer=ears)
    assert (done.ran, done.failed) == (1, {})
    name = file.relative_to(tmp_path / "out")
    assert any("cannot be read" in text and f"({name})" in text for text in ears.said)


def test_a_run_with_another_recipe_is_not_reused(tmp_path):
    one = table(tmp_path / "one")
    two = table(tmp_path / "two", rounds=("rounds = 2", "rounds = 1"))
    reproduce(one, settings=["shift"], out=tmp_path / "out" / "one", device="cpu")
    assert reproduce(two, settings=["shift"], out=tmp_path / "out" / "two", device="cpu").ran == 2


def test_a_curve_needs_the_score_of_every_round(tmp_path):
    one = table(tmp_path / "one")
    curve = table(tmp_path / "two", store=('name = "shift"', 'name = "shift"\nstore = ["curve"]'))
    reproduce(one, settings=["shift"], only=["FedAvg"], out=tmp_path / "out" / "one", device="cpu")
    again = reproduce(curve, settings=["shift"], only=["FedAvg"], out=tmp_path / "out" / "two", device="cpu")
    assert again.ran == 1
    sparse = "\nrecipe.evaluate_every = 2\n"
    rare = table(tmp_path / "rare", store=('name = "shift"\n', f'name = "shift"\nstore = ["curve"]{sparse}'))
    other = reproduce(rare, settings=["shift"], only=["FedAvg"], out=tmp_path / "out" / "rare", device="cpu")
    assert other.ran == 1  # a curve of other rounds is another curve
    third = reproduce(one, settings=["shift"], only=["FedAvg"], out=tmp_path / "out" / "three", device="cpu")
    assert third.ran == 0
