"""The model card of an export says what is true of exactly that model."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import torch

import fednorms as fn
from fednorms import adapt, export, load_model
from fednorms.evaluation.intervals import wilson
from fednorms.explain.leaves import what_leaves
from fednorms.runs.driver import execute
from tests.support.after import federation, recipe, write_images


def trained(folder, method="fedbn", sites=None, **settings):
    execute(recipe(method, **settings), out=folder, federation=sites or federation())
    return folder


def sections(folder):
    text = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def about(folder):
    return json.loads((folder / "model.json").read_text())


SECTIONS = ["What it is", "Data", "Scores", "Intended use", "Limits", "Privacy", "Versions", "How to reproduce"]


@pytest.mark.parametrize(("site", "whose"), [("b", 'personal model of site "b"'), (None, "mean of the clients'")])
def test_a_card_says_which_model_it_is_and_how_good(site, whose, tmp_path):
    trained(tmp_path / "r", evaluate=["personal", "averaged"])
    export(tmp_path / "r", tmp_path / "x", site=site, averaged=site is None)
    card = sections(tmp_path / "x")
    assert list(card) == SECTIONS
    assert whose in card["What it is"]
    # The scores are those of the files that were written, on the test images of the sites in the table.
    model, sites = load_model(tmp_path / "x"), federation()
    for name in [site] if site else list("abc"):
        test = sites.site(name).test
        right = float((model.logits(test.x).argmax(1) == test.y).double().mean())
        row = re.search(rf"^\| {name} \| {len(test)} \| ([\d.]+) ", card["Scores"], re.MULTILINE)
        assert float(row[1]) == pytest.approx(100 * right, abs=0.051)
    assert ("| a |" in card["Scores"]) == (site is None)
    assert '"personal/own"' in card["Scores"] if site else '"averaged/global"' in card["Scores"]


def test_a_model_that_was_never_tested_says_so(tmp_path):
    trained(tmp_path / "r")
    export(tmp_path / "r", tmp_path / "x", averaged=True)
    assert re.search(r'\*\*Never scored\*\*: .*"averaged/global"', sections(tmp_path / "x")["Scores"])
    assert about(tmp_path / "x")["card"]["tested"]["judgement"] is None


def test_without_kept_predictions_the_recorded_scores_are_shown(tmp_path):
    trained(tmp_path / "r", keep_predictions=False)
    export(tmp_path / "r", tmp_path / "x", site="c")
    found = about(tmp_path / "x")["card"]["tested"]["scores"]["sites"]["c"]
    assert f"| c | {wilson(found['accuracy'], found['samples'])} |" in sections(tmp_path / "x")["Scores"]


def test_an_adapted_model_has_the_scores_of_the_new_site(tmp_path):
    trained(tmp_path / "r")
    clinic = write_images(tmp_path / "clinic", {"cat": 6, "dog": 6})
    done = adapt(tmp_path / "r", clinic, out=tmp_path / "x")
    card = sections(tmp_path / "x")
    assert 'adapted to site "clinic" with 8 images' in card["What it is"]
    assert f"| clinic | 4 | {100 * done.after.accuracy:.1f} " in card["Scores"]
    adapt(tmp_path / "r", clinic, out=tmp_path / "y", test=0.0)
    assert "Never scored" in sections(tmp_path / "y")["Scores"]


def test_a_card_counts_the_images_and_names_no_folder(tmp_path):
    for name, k in (("north", 0), ("south", 2)):
        write_images(tmp_path / "secret" / "data" / name, {"cat": 6, "dog": 6}, size=8, k=k)
    folder = f"folder:{tmp_path / 'secret' / 'data'}"
    execute(recipe("fedavg", federation=folder, rounds=1), out=tmp_path / "r")
    export(tmp_path / "r", tmp_path / "x")
    card = sections(tmp_path / "x")
    assert re.search(r"^\| north \| yes \| \d+ \| \d+ \| \d+ \|$", card["Data"], re.MULTILINE)
    counts = [int(n) for n in re.findall(r"\| (\d+) \| (\d+) \| (\d+) \|", card["Data"])[0]]
    assert sum(counts) == 12
    assert "ask the owners" in card["Data"]
    assert "Fewer than 30 test images" in card["Limits"]
    for file in ("MODEL_CARD.md", "model.json", "README.txt", "load.py"):
        assert "secret" not in (tmp_path / "x" / file).read_text(), file


def test_the_recipe_of_a_card_repeats_the_run(tmp_path):
    fn.run("fedbn", rounds=2, out=tmp_path / "r")
    export(tmp_path / "r", tmp_path / "x", site="foggy")
    [text] = re.findall(r"```toml\n(.*?)```", sections(tmp_path / "x")["How to reproduce"], re.DOTALL)
    assert tomllib.loads(text) == tomllib.loads((tmp_path / "r" / "recipe.toml").read_text())
    again = fn.run(recipe=fn.Recipe.from_toml(text), out=tmp_path / "again")
    export(tmp_path / "again", tmp_path / "y", site="foggy")
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == (tmp_path / "y" / "model.safetensors").read_bytes()
    assert again.rounds == 2


def test_a_card_states_epsilon_of_its_round(tmp_path):
    pytest.importorskip("dp_accounting")
    result = fn.run("dpcentral(clip=0.5, noise=1.1) + silobn", rounds=2, out=tmp_path / "r")
    export(tmp_path / "r", tmp_path / "x", site="foggy")
    assert f"epsilon {result.history[-1]['epsilon']:.3g} at delta 1e-05" in sections(tmp_path / "x")["Privacy"]
    export(trained(tmp_path / "plain"), tmp_path / "y", site="a")
    assert "No differential privacy" in sections(tmp_path / "y")["Privacy"]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "scaffold", "fedrdn", "fedfa", "hbn", "fedproto"])
def test_a_card_lists_what_left_the_sites_as_describe_measures_it(method, tmp_path):
    trained(tmp_path / "r", method, rounds=1)
    export(tmp_path / "r", tmp_path / "x", site="a")
    said = about(tmp_path / "x")["card"]["privacy"]
    measured = what_leaves(method, "cnn-small", classes=3)
    model = [x for x in measured.leaving if x.sender == "model"]
    assert said["also_sent_by"] == list(dict.fromkeys(x.sender for x in measured.leaving if x.sender != "model"))
    assert said["sent_tensors"] == sum(len(x.names) for x in model)
    assert said["sent_bytes"] == sum(x.nbytes for x in model)


def test_a_data_sets_license_is_in_the_card(tmp_path, monkeypatch):
    from fednorms.data.readers import READERS

    trained(tmp_path / "r")
    text = (tmp_path / "r" / "recipe.toml").read_text()
    (tmp_path / "r" / "recipe.toml").write_text(text.replace('"custom:tiny"', '"cifar-10-c"'))
    export(tmp_path / "r", tmp_path / "x", site="a")
    published = READERS["cifar-10-c"].published
    assert f"License of the data: {published.license}." in sections(tmp_path / "x")["Data"]
    assert all(link in sections(tmp_path / "x")["Data"] for link in published.links.values())


def test_measured_statistics_were_never_scored(tmp_path):
    sites = federation(unseen=False)
    sites = fn.Federation(
        "large",
        [
            fn.Site(s.name, s.domain, *(fn.data.Split(p.x.repeat(1, 1, 4, 4), p.y) for p in s.splits.values()))
            for s in sites.sites
        ],
        sites.classes,
        sites.preprocessing,
    )
    execute(recipe("fedavg", model="cnn4", rounds=1), out=tmp_path / "r", federation=sites)
    export(tmp_path / "r", tmp_path / "x", federation=sites)
    assert "Never scored" in sections(tmp_path / "x")["Scores"]
    assert torch.isfinite(load_model(tmp_path / "x").logits(sites.site("a").test.x)).all()
