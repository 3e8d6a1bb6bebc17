"""Files that version 0.1 wrote are still opened, used and continued.

`tests/fixtures/make_v0_1.py` made them at the first release. They come from another machine, whose floats may differ in
the last bit. So rounds, fields and finite scores are compared; bits only where they are read, not computed.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import fednorms as fn
from fednorms.cli import main as command_line
from fednorms.data.packed import check_pack
from fednorms.flower.collect import export_at_site
from fednorms.flower.generations import Generations
from fednorms.flower.settings import fingerprint
from tests.fixtures import material

STORED = Path(material.__file__).with_name("v0_1")
FINGERPRINT = "f018285b855da92c5fd5df14e37dc590"  # of the images in the pack
OF_CUSTOM = "cad33bc2c4befa67add456d752292010"  # with validation images
SITES = ["east", "north", "south"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A copy of all files, as the working directory: recipes name the pack by a relative path."""
    shutil.copytree(STORED, tmp_path / "v0_1")
    monkeypatch.chdir(tmp_path / "v0_1")
    return tmp_path / "v0_1"


@pytest.fixture
def pull(parts_as_before):
    return material.make_part()


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def means(row: dict) -> list[float]:
    return [score["mean"] for score in row["scores"].values()]


def picture(path: Path) -> Path:
    x, _ = material.images(1, 0)
    Image.fromarray(x[0].transpose(1, 2, 0)).save(path)
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


# -- data -----------------------------------------------------------------------------------------------------------
def test_a_pack_holds_the_federation(here):
    packed, made = fn.federation(str(here / material.PACK)), material.federation()
    assert packed.fingerprint() == made.fingerprint() == FINGERPRINT
    assert material.federation(val=True).fingerprint() == OF_CUSTOM
    assert packed.classes == made.classes
    for site in made.sites:
        for part, split in site.splits.items():
            stored = packed.site(site.name).splits[part]
            assert torch.equal(stored.x[:], split.x)
            assert torch.equal(stored.y, split.y)
    assert check_pack(here / material.PACK)["images"] == sum(material.SITES.values()) + 18


# -- a finished run -------------------------------------------------------------------------------------------------
def test_a_finished_run_is_opened_and_tested(here):
    before = contents(here / "finished")
    opened = fn.open_run("finished")
    assert opened.state.round == 2
    assert sorted(opened.clients) == SITES
    assert opened.recipe.fingerprint == FINGERPRINT
    assert opened.notes == []
    scores = fn.evaluate_run("finished", ["personal", "personal/batch"])
    assert sorted(scores) == ["personal/batch/test", "personal/own/test"]
    stored = json.loads((here / "finished" / "summary.json").read_text())["last"]["personal/own/test"]
    assert scores["personal/own/test"].to_dict().keys() == stored.keys()
    assert all(math.isfinite(s.loss) for score in scores.values() for s in score.sites.values())
    assert contents(here / "finished") == before


def test_a_finished_run_is_not_run_again(here):
    before = contents(here / "finished" / "checkpoints")
    result = fn.resume("finished")
    assert [row["round"] for row in result.history] == [1, 2]
    assert result.history == rows_of(STORED / "finished")
    assert contents(here / "finished" / "checkpoints") == before


def test_a_finished_run_predicts_and_exports(here):
    found = fn.predict("finished", [picture(here / "image.png")], site="north")
    assert found[0].label in material.CLASSES
    assert sum(found[0].probabilities.values()) == pytest.approx(1)
    fn.export("finished", "again", site="north")
    old, new = (json.loads(Path(name, "model.json").read_text()) for name in ("exported", "again"))
    assert new.keys() == old.keys() | {"files", "hash", "card"}
    images = torch.from_numpy(material.images(5, 1)[0])
    # Both are the same model on the same machine.
    assert torch.equal(fn.load_model("exported").logits(images), fn.load_model("again").logits(images))


def test_an_exported_model_is_loaded(here):
    model = fn.load_model("exported")
    assert model.classes == tuple(material.CLASSES)
    assert model.about["trained"]["site"] == "north"
    probabilities = model(torch.from_numpy(material.images(5, 1)[0]))
    assert probabilities.shape == (5, 3)
    assert torch.allclose(probabilities.sum(1), torch.ones(5))
    found = fn.predict("exported", [picture(here / "image.png")])
    assert found[0].label in material.CLASSES


# -- unfinished runs ------------------------------------------------------------------------------------------------
def test_an_unfinished_run_is_resumed(here):
    then = rows_of(STORED / "half")
    assert [row["round"] for row in then] == [1, 2, 3]
    told = (here / "half" / "recipe.toml").read_text()
    result = fn.resume("half")
    rows = rows_of(here / "half")
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[:2] == then[:2], "up to the checkpoint nothing is made again"
    assert rows[2].keys() == then[2].keys()
    assert all(math.isfinite(value) for row in rows for value in [row["train_loss"], *means(row)])
    assert (here / "half" / "recipe.toml").read_text() == told
    assert result.rounds == 5
    fresh = fn.run(recipe=result.recipe.model_copy(update={"fingerprint": ""}), out="fresh")
    assert [list(row) for row in fresh.history] == [list(row) for row in rows]
    assert [row["clients"] for row in fresh.history] == [row["clients"] for row in rows]
    assert [row["bytes_up"] for row in fresh.history] == [row["bytes_up"] for row in rows]
    now, then = (fn.open_run(name) for name in ("fresh", "half"))
    assert list(now.state.model) == list(then.state.model)
    assert sorted(now.clients) == sorted(then.clients)
    assert {k: list(t) for k, t in now.state.parts.items()} == {k: list(t) for k, t in then.state.parts.items()}


def test_an_unfinished_run_is_resumed_from_the_command_line(here):
    assert command_line(["resume", "half", "--quiet"]) == 0
    assert [row["round"] for row in rows_of(here / "half")] == [1, 2, 3, 4, 5]


def test_a_run_with_custom_code_is_resumed(here, pull):
    given = {"federation": material.federation(val=True), "model": material.model(), "loss": material.smoothed}
    result = fn.resume("custom", **given)
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    assert result.history[:2] == rows_of(STORED / "custom")
    assert all(math.isfinite(value) for row in result.history for value in means(row))
    best = fn.open_run("custom", "best", **given)
    assert best.state.round == result.best["round"]
    assert sorted(best.clients["north"].parts) == ["fedbn", "pull", "scaffold"]


def test_a_run_with_custom_code_knows_its_best_round(here, pull):
    given = {"federation": material.federation(val=True), "model": material.model(), "loss": material.smoothed}
    stored = json.loads((here / "custom" / "checkpoints" / "best" / "manifest.json").read_text())
    opened = fn.open_run("custom", "best", **given)
    assert opened.state.round == stored["round"]
    scores = fn.evaluate_run("custom", which="best", **given)
    assert [math.isfinite(s.mean) for s in scores.values()] == [True]


def test_other_custom_code_is_still_refused(here, parts_as_before):
    @fn.part("pull")
    class Pull(fn.Part):
        mu: float = fn.option(0.5, at_least=0)

        def loss(self, s):
            return self.mu * s.logits.square().mean()

    with pytest.raises(fn.BadInput, match="pull"):
        fn.resume("custom", federation=material.federation(val=True), model=material.model(), loss=material.smoothed)


# -- across machines ------------------------------------------------------------------------------------------------
def test_a_site_exports_its_model(here):
    for node, site in enumerate(material.SITES, start=100):
        export_at_site(Path("flower/run"), site, Path(f"of {site}"), state=Path("flower/state") / str(node))
        model = fn.load_model(f"of {site}")
        assert model.about["trained"]["site"] == site
        assert model.about["trained"]["round"] == 1
        assert torch.isfinite(model.logits(torch.from_numpy(material.images(4, 1)[0]))).all()


def test_a_sites_state_is_where_it_was(here):
    recipe = fn.Recipe.read("flower/run/recipe.toml")
    kept = Generations(Path("flower/state/102"), fingerprint(recipe), "east")
    assert kept.rounds() == [1, 2]
    state = kept.load(1)
    assert state.round == 1
    assert "norm1.running_mean" in state.local
    assert kept.load_fixed()


def test_a_run_across_machines_is_continued(here):
    pytest.importorskip("flwr")
    from fednorms.flower.server import serve
    from tests.support.flower_in_process import LocalGrid

    config = {"recipe": fn.Recipe.read("flower/run/recipe.toml").to_toml(), "deploy.sites": ",".join(material.SITES)}
    config |= {"deploy.out": "flower/run", "deploy.wait": 5.0, "deploy.deadline": 5.0}
    federation = fn.Recipe.read("flower/run/recipe.toml").federation  # a file, which a node must name itself
    nodes = {100 + k: {"site": name, "federation": federation} for k, name in enumerate(material.SITES)}
    desk = LocalGrid(config, Path("flower"), nodes)
    result = serve(desk, config)
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert result.history[0] == rows_of(STORED / "flower" / "run")[0]
    assert [kind for _, kind in desk.log].count("train") == 2 * len(material.SITES)
    assert not any("lost" in row for row in result.history)


def test_a_project_is_kept_and_needs_one_line_and_its_keys(here, capsys):
    """Its sites find their states under the hash of its recipe, and only the server's address is new."""
    pytest.importorskip("flwr")
    from fednorms.flower.keys import read_keys
    from fednorms.flower.project import read_project
    from fednorms.flower.task import load_app

    project = Path("flower/project")
    recipe, deployment = read_project(project)
    assert deployment.site_names == list(material.SITES)
    assert Generations(Path("flower/state/102"), fingerprint(recipe), "east").rounds() == [1, 2]
    load_app(project)
    sys.modules.pop("fednorms_app")
    certificates = ["deploy", "certificates", str(project)]
    assert command_line(certificates) == 2
    assert 'Add: [tool.fednorms] address = "HOST:8443"' in capsys.readouterr().err
    with (project / "pyproject.toml").open("a") as file:
        file.write('\n[tool.fednorms]\naddress = "server.example:8443"\n')
    assert command_line(certificates) == 0
    assert set(read_keys(project / "roster.toml").keys) == set(material.SITES)
    assert fingerprint(read_project(project)[0]) == fingerprint(recipe)


# -- tables ---------------------------------------------------------------------------------------------------------
def test_a_table_is_continued_without_repeating_a_run(here):
    before = json.loads(Path("reproduced/results/three/fedavg/seed-0.json").read_bytes())
    done = fn.reproduce("table", out="reproduced", device="cpu")
    assert (done.ran, done.skipped, done.failed) == (1, {}, {})
    assert before in json.loads(Path("reproduced/results.json").read_bytes())["runs"]
    told = done.to_dict()
    assert told["stale"] == told["foreign"] == []
    assert {row: all(cell["ours"] is not None for cell in cells.values()) for row, cells in _cells(told).items()} == {
        "FedAvg": True,
        "FedBN": True,
    }
    assert fn.reproduce("table", out="reproduced", device="cpu").ran == 0


def _cells(told: dict) -> dict[str, dict]:
    return told["settings"][0]["rows"]
