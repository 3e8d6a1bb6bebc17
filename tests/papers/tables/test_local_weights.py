"""`reproduce --weights MODEL=FILE`: models start from local files, and results name them without their folder."""

from __future__ import annotations

import json

import pytest
import torch

import fednorms as fn
from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.models import build
from fednorms.papers.tables.catalog import open_table
from fednorms.papers.tables.local_weights import with_weights
from tests.support.tables import table


def test_a_table_starts_from_local_weights_and_says_so(tmp_path):
    mini, out, file = table(tmp_path / "mini"), tmp_path / "out", tmp_path / "secret" / "start.pt"
    file.parent.mkdir()
    torch.save(build("cnn-small", 10, size=8, seed=5).state_dict(), file)
    options = {"out": out, "only": ["FedAvg"], "settings": ["shift"], "device": "cpu"}
    fn.reproduce(mini, weights={"cnn-small": file}, **options)
    stored = (out / "results.json").read_text()
    assert "secret" not in stored
    [run] = json.loads(stored)["runs"]
    name, _, digest = run["recipe"]["weights"].partition("@")
    assert name == "start.pt"
    assert len(digest) == 12
    again = fn.reproduce(mini, weights=[f"cnn-small={file}"], **options)
    assert json.loads((out / "results.json").read_text())["runs"][0]["date"] == run["date"]
    assert again.failed == {}
    assert "starts from the local file start.pt" in (out / "RESULTS.md").read_text()
    plan = fn.reproduce(mini, dry_run=True, weights={"cnn-small": file}, **options).planned
    assert plan.runs == 0, "the same file is the same run"
    torch.save(build("cnn-small", 10, size=8, seed=6).state_dict(), file)
    plan = fn.reproduce(mini, dry_run=True, weights={"cnn-small": file}, **options).planned
    assert plan.runs == 1, "another content is another run"
    assert fn.reproduce(mini, dry_run=True, **options).planned.runs == 1, "without weights, too"


def test_runs_from_scratch_stay_from_scratch_next_to_pretrained_ones(tmp_path):
    pretrained = ('recipe.federation = "pacs"', 'recipe.federation = "pacs"\nrecipe.pretrained = true')
    model = ('model = "cnn-small"', 'model = "timm:efficientnet_lite0"')
    both = open_table(table(tmp_path / "mini", start=pretrained, model=model))
    changed = with_weights(both, {"timm:efficientnet_lite0": tmp_path / "start.pt"})
    scratch, pictures = (changed.recipe_of(setting, changed.rows[0], {}) for setting in changed.settings)
    assert (scratch.weights, scratch.pretrained) == ("", False)
    assert (pictures.weights, pictures.pretrained) == (str(tmp_path / "start.pt"), False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cnn-small", "expected MODEL=FILE"),
        ("cnn-small=nowhere.pt", 'no file "nowhere.pt"'),
        ("resnet=start.pt", 'has no model "resnet"'),
    ],
)
def test_bad_weights(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.pt").write_bytes(b"x")
    table(tmp_path / "mini")
    assert main(["reproduce", "mini", "--weights", text]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(BadInput, match=r"MODEL=FILE|no file|no model"):
        fn.reproduce(tmp_path / "mini", weights=[text])
