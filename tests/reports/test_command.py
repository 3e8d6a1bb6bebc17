"""`fednorms report`, and the report at the end of other commands."""

from __future__ import annotations

import json

import pytest

from fednorms.cli import main
from tests.support import tables
from tests.support.pages import read_page

QUICK_OPTIONS = ("--rounds", "1", "--size", "8", "--federation", "digits-shift", "--quiet")


def test_a_run_is_reported_at_its_end_and_again(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", *QUICK_OPTIONS, "--out", str(out)]) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    first = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.html")
    assert (out / "report.html").read_text() == first
    assert main(["report", str(out), "--images", "--json", "--out", str(tmp_path / "new" / "r.html")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == (tmp_path / "new" / "r.html").stat().st_size
    assert read_page(tmp_path / "new" / "r.html").sources


def test_a_comparison_says_where_its_report_is(tmp_path, capsys):
    out = tmp_path / "c"
    assert main(["compare", "--methods", "fedavg", "--seeds", "1", *QUICK_OPTIONS, "--out", str(out), "--json"]) == 0
    assert str(out / "report.html") in json.loads(capsys.readouterr().out)["files"]
    assert "fedavg is best of 1 method" in read_page(out / "report.html").text


def test_a_table_says_where_its_report_is(tmp_path, capsys):
    folder = tables.table(tmp_path / "mini")
    assert main(["reproduce", str(folder), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out.replace("\n", "")
    read_page(tmp_path / "out" / "report.html")


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", *QUICK_OPTIONS, "--out", str(out)]) == 0
    (out / "report.html").unlink()
    (out / "report.html").mkdir()  # in the way
    capsys.readouterr()
    assert main(["run", *QUICK_OPTIONS, "--out", str(out)]) == 0  # finished already
    said = capsys.readouterr()
    assert "note: no report was written" in said.err
    assert "report:" not in said.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere"], "is not a run, comparison, table or advice"),
        (["fedwon-table-1", "--images"], "Leave out --images"),
        ([], "RUN|COMPARISON|TABLE|ADVICE"),
    ],
)
def test_mistakes_are_explained(given, said, capsys):
    assert main(["report", *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
