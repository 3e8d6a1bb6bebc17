"""Averages over settings: of the right cells, seed by seed, next to the published ones, and never counted twice."""

from __future__ import annotations

import csv
import io
from statistics import fmean, stdev

import pytest

from fednorms.cli.reproduce_show import show
from fednorms.core.errors import BadInput
from fednorms.papers.tables.report import csv_table, markdown
from fednorms.papers.tables.reproduce import Reproduction
from fednorms.papers.tables.summary import summarize
from fednorms.papers.tables.table import Table
from tests.support.tables import found

OURS = {("a", "FedAvg"): [80.0, 84.0], ("b", "FedAvg"): [60.0, 58.0], ("a", "FedBN"): [90.0, 92.0]}


def table(**values):
    made = {
        "paper": "fednorms",
        "label": "Mini",
        "title": "Two settings",
        "averages": {"All": {"a": "A", "b": "B"}},
        "settings": [
            {"name": "a", "columns": {"Other": "worst", "A": "mean"}},
            {"name": "b", "columns": {"B": "mean"}},
            {"name": "c", "columns": {"C": "mean"}},
        ],
        "rows": [
            {"name": "FedAvg", "method": "fedavg", "averages": {"All": 75.0}, "published": {"a": {"A": 80}}},
            {"name": "FedBN", "method": "fedbn", "averages": {"All": [71.0, 0.5]}},
            {"name": "Alone", "method": "gn", "settings": ["a", "c"]},
        ],
    }
    return Table.make(made | values)


def averages(summary):
    section = summary.sections[-1]
    assert section.setting.name == "averages"
    return {row: entries["All"] for row, entries in section.rows.items()}


def test_a_row_is_averaged_seed_by_seed_over_its_settings():
    cells = averages(summarize(table(), found({**OURS, ("a", "Alone"): [50.0, 52.0]})))
    entry = cells["FedAvg"]
    each = [fmean((80, 60)), fmean((84, 58))]
    assert (entry.ours, entry.std) == (pytest.approx(fmean(each)), pytest.approx(stdev(each)))
    assert (entry.seeds, entry.verdict, entry.counts) == (2, "miss", False)  # 70.5 against 75
    assert (cells["FedBN"].ours, cells["FedBN"].verdict) == (None, "missing")  # "b" has not run
    assert cells["Alone"].ours == pytest.approx(51)  # "b" is not its setting


def test_only_seeds_that_ran_everywhere_are_averaged():
    cells = averages(summarize(table(), found({("a", "FedAvg"): [80.0, 84.0, 99.0], ("b", "FedAvg"): [60.0]})))
    assert (cells["FedAvg"].ours, cells["FedAvg"].seeds, cells["FedAvg"].std) == (pytest.approx(70), 1, None)


def test_a_seed_that_diverged_anywhere_is_a_miss():
    better = {("a", "FedAvg"): [90.0, 90.0], ("b", "FedAvg"): [90.0, 90.0]}
    entry = averages(summarize(table(), found(better, diverged={("b", "FedAvg", 1)})))["FedAvg"]
    assert (entry.ours, entry.diverged, entry.verdict) == (pytest.approx(90), 1, "miss")


def test_an_average_with_a_column_that_is_not_comparable_is_not_either():
    settings = table().model_dump()["settings"]
    settings[0]["incomparable"] = {"A": "drawn by hand"}
    summary = summarize(table(settings=settings), found(OURS))
    assert averages(summary)["FedAvg"].verdict == "not comparable"
    assert summary.sections[-1].not_comparable == {"All": "contains A: drawn by hand"}
    assert summary.share.endswith("runs are done.")  # no published cell can be judged
    assert summarize(table(), found(OURS)).share.endswith("runs are done; 1 of 1 published cells can be judged.")


def test_averages_are_shown_if_there_are_any_and_never_counted(capsys):
    whole, half = (summarize(table(), found(ours)) for ours in (OURS, {("a", "FedAvg"): [80.0]}))
    assert whole.score == half.score == (1, 1)
    assert "## Averages over settings" in markdown(whole)
    assert "70.5 ± 0.7 ✗<br>75.0 (−4.5)" in markdown(whole)
    assert "Averages over settings" in whole.text()
    assert "Not run yet: b; c; Averages over settings." in markdown(half)
    show(Reproduction(table(), None, whole, 0, {}, {}))
    assert "Averages over settings" in capsys.readouterr().out
    lines = list(csv.DictReader(io.StringIO(csv_table(half))))
    assert {r["row"]: r["published"] for r in lines if r["setting"] == "averages"} == {
        "FedAvg": "75",
        "FedBN": "71",
        "Alone": "",
    }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"averages": {"All": {"a": "A"}}}, "at least two settings, got 1"),
        ({"averages": {"All": {"a": "A", "bb": "B"}}}, 'no setting "bb"'),
        ({"averages": {"All": {"a": "A", "b": "A"}}}, 'setting "b" has no column "A"'),
        ({"averages": {"Al": {"a": "A", "b": "B"}}}, 'row "FedAvg": averages: the table has no "All"'),
    ],
)
def test_averages_of_nothing_are_refused(values, said):
    with pytest.raises(BadInput, match=said):
        table(**values)
