"""`fednorms analyze` and `list analyses`."""

from __future__ import annotations

import json

import pytest
import torch

import fednorms as fn
from fednorms.cli import main
from fednorms.cli.analyze import _labeled
from fednorms.papers.analysis.measures import ANALYSES
from tests.support.kept import SMALL


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("analyze") / "run"
    fn.run(recipe=fn.Recipe.make(SMALL | {"method": "fedavg", "rounds": 1}), out=path)
    return path


def test_numbers_are_printed_and_files_written(run, tmp_path, capsys):
    assert main(["analyze", str(run), "divergence", "four-factors", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "mean over pairs" in said
    assert "alignment of weights" in said
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"divergence.json", "divergence.png", "four-factors.json", "four-factors.png"}
    stored = json.loads((tmp_path / "out" / "divergence.json").read_text())
    assert stored == fn.analyze(run, "divergence").plain()


def test_json(run, capsys):
    assert main(["analyze", str(run), "divergence", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["analyses"]["divergence"]["scalars"]["mean over pairs"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["divergense"], 'No analysis "divergense": did you mean "divergence"'),
        (["norms"], "only its last round"),
        (["divergence", "nonsense"], 'No analysis "nonsense"'),
    ],
)
def test_mistakes_are_exit_code_2_and_nothing_is_written(run, tmp_path, capsys, args, words):
    assert main(["analyze", str(run), *args, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_missing_device(run, capsys):
    assert main(["analyze", str(run), "divergence", "--device", "cuda"]) == 2
    assert "cuda" in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_refused_before_the_analysis(run, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["analyze", str(run), "divergence", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "is a file. Choose another folder" in said.err
    assert "mean over pairs" not in said.out
    assert (tmp_path / "out").read_text() == "mine"


def test_one_analysis_that_fails_does_not_end_the_others(run, tmp_path, capsys):
    words = ["divergence", "norms", "four-factors"]
    assert main(["analyze", str(run), *words, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "mean over pairs" in said.out
    assert "norms: " in said.err
    assert "only its last round" in said.err
    names = {f"{name}.{kind}" for name in ("divergence", "four-factors") for kind in ("json", "png")}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names


def test_without_a_name_all_analyses_are_listed(run, capsys):
    assert main(["analyze", str(run)]) == 2
    assert "four-factors" in capsys.readouterr().err


def test_an_analysis_without_a_single_number_says_so(run, capsys):
    assert main(["analyze", str(run), "embedding"]) == 0
    assert "--out DIR writes" in capsys.readouterr().out


def test_several_runs_share_a_picture_and_runs_of_one_method_are_its_seeds(tmp_path, capsys):
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for path, method, seed in zip(runs, ("fedavg", "fedavg", "fedfn"), (0, 1, 0), strict=True):
        recipe = SMALL | {"method": method, "rounds": 2, "seed": seed}
        fn.run(recipe=fn.Recipe.make(recipe), out=path)
    assert main(["analyze", *map(str, runs), "norms", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "only one point" in said
    assert json.loads((tmp_path / "out/norms.json").read_text()).keys() == {"a", "b", "c"}
    found = {str(path): fn.analyze(path, "norms") for path in runs}
    assert [f.label for f in _labeled(found)] == ["fedavg", "fedavg", "fedfn"]
    fn.run(recipe=fn.Recipe.make(SMALL | {"method": "fedavg", "rounds": 3}), out=tmp_path / "d")
    found[str(tmp_path / "d")] = fn.analyze(tmp_path / "d", "norms")
    assert [f.label for f in _labeled(found)] == ["a", "b", "fedfn", "d"]


def test_a_missing_run(tmp_path, capsys):
    assert main(["analyze", str(tmp_path / "nowhere"), "divergence"]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_a_missing_second_run(run, tmp_path, capsys):
    assert main(["analyze", str(run), str(tmp_path / "nowhere"), "divergence"]) == 2
    assert f'No run "{tmp_path / "nowhere"}"' in capsys.readouterr().err


def test_all_analyses_are_listed(capsys):
    assert main(["list", "analyses", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["analyses"]
    assert [row["name"] for row in listed] == list(ANALYSES)
    assert all(row["of"] and row["what it measures"] for row in listed)
