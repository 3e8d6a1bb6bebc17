"""`reproduce --dry-run` runs and writes nothing; `--quick` is a marked trial that is never judged."""

from __future__ import annotations

import json

import pytest

import fednorms as fn
from fednorms.cli import main
from fednorms.papers.tables.catalog import file_of, known
from fednorms.papers.tables.table import Table
from fednorms.papers.tables.trial import trial
from fednorms.papers.tables.validation import problems
from tests.support.tables import results, table


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "mini")
    before = files(tmp_path)
    assert main(["reproduce", "mini", "--dry-run", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 runs would start" in out
    assert "They take about " in out  # from a few timed rounds
    assert "pacs" in out
    assert "skipped" in out
    assert files(tmp_path) == before
    assert main(["reproduce", "mini", "--dry-run", "--json", "--only", "FedBN"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] == 1
    assert [(s["setting"], s["data"], s["left"]) for s in said["settings"]] == [
        ("shift", "", 1),
        ("pictures", "pacs", 1),
    ]
    assert files(tmp_path) == before


def test_a_dry_run_says_why_a_trial_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "mini", broken=('method = "fedavg"', 'method = "fedavg"\nrecipe.weights = "nowhere.pt"'))
    assert main(["reproduce", "mini", "--dry-run", "--settings", "shift"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "How long they take is not known: a trial run failed (shift / FedAvg). " in said
    assert '"nowhere.pt"' in said


def test_a_dry_run_counts_what_is_finished_and_takes_its_time_from_there(tmp_path):
    mini, out = table(tmp_path / "mini"), tmp_path / "out"
    fn.reproduce(mini, out=out, only=["FedAvg"], settings=["shift"], device="cpu")
    before = {name: (out / name).read_bytes() for name in files(out) if (out / name).is_file()}
    planned = fn.reproduce(mini, out=out, settings=["shift"], device="cpu", dry_run=True).planned
    assert [(s.finished, s.left, s.rounds) for s in planned.settings] == [(1, 1, [2])]
    assert planned.runs == 1
    assert planned.time.basis == "finished runs"
    assert {name: (out / name).read_bytes() for name in files(out) if (out / name).is_file()} == before


def test_a_dry_run_counts_the_runs_of_searches(tmp_path):
    searched = ('method = "fedavg"', 'method = "fedavg"\nsearch."training.lr" = [0.1, 0.2, 0.3]')
    mini = table(tmp_path / "mini", search=searched)
    planned = fn.reproduce(mini, out=tmp_path / "out", settings=["shift"], dry_run=True).planned
    assert [(s.search, s.left) for s in planned.settings] == [(3, 2)]
    assert planned.runs == 5


def test_a_trial_is_marked_and_never_judged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    searched = ('method = "fedavg"', 'method = "fedavg"\nsearch."training.lr" = [0.3, 0.2]\nrecipe.rounds = 7')
    table(tmp_path / "mini", search=searched)
    assert main(["reproduce", "mini", "--quick", "--rounds", "1", "--settings", "shift"]) == 0
    out = capsys.readouterr().out
    assert "published |" not in out
    assert "no published numbers" in out
    home = tmp_path / "runs" / "trial-mini-1"
    stored = results(home)
    assert {key[:2] for key in stored} == {("shift", "FedAvg"), ("shift", "FedBN")}
    assert {record["recipe"]["rounds"] for record in stored.values()} == {1}
    assert stored["shift", "FedAvg", 0]["recipe"]["training"]["lr"] == 0.3  # the search's first value
    page = (home / "RESULTS.md").read_text()
    assert "TRIAL of 1 round, not comparable" in page
    assert "says nothing about the paper" in page
    assert fn.reproduce("mini", settings=["shift"], quick=True, rounds=1).ran == 0  # it is continued, too


def test_a_trial_does_not_replace_the_report_of_the_table(tmp_path):
    mini, out = table(tmp_path / "mini"), tmp_path / "out"
    fn.reproduce(mini, out=out, settings=["shift"], device="cpu")
    page = (out / "RESULTS.md").read_bytes()
    with pytest.raises(fn.BadInput, match="holds results of other runs"):
        fn.reproduce(mini, out=out, quick=True, rounds=1)
    assert (out / "RESULTS.md").read_bytes() == page


def test_rounds_need_quick(tmp_path, capsys):
    assert main(["reproduce", str(table(tmp_path / "mini")), "--rounds", "3"]) == 2
    assert "add --quick" in capsys.readouterr().err
    with pytest.raises(fn.BadInput, match="rounds must be"):
        fn.reproduce(tmp_path / "mini", quick=True, rounds=0)


@pytest.mark.parametrize("paper", sorted({name.partition("-")[0] for name in known()}))
def test_a_trial_of_every_table_is_a_table_with_these_rounds_and_no_published_value(paper):
    for name in (n for n in known() if n.startswith(f"{paper}-")):
        tried = trial(Table.read(file_of(name)), 2)
        assert problems(tried) == []
        assert not tried.has_published
        every = [tried.recipe_of(s, row, {"seed": 0}) for s in tried.settings for row in tried.rows if row.runs_in(s)]
        assert {recipe.rounds for recipe in every} == {2}, name
