"""Using a run after training: predict, export, load, adapt; even without the run's data."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import fednorms as fn
from fednorms import adapt, evaluate_run, export, load_model, open_run, predict
from fednorms.core.errors import BadInput, RunFailed
from fednorms.evaluation.intervals import Interval
from fednorms.evaluation.modes import averages
from fednorms.evaluation.scores import SiteScore
from fednorms.runs.driver import execute
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use import export as exporting
from fednorms.runs.use import graphs
from fednorms.runs.use.adapt import Adapted
from fednorms.runs.use.predict import image_files
from tests.support.after import CLASSES, federation, recipe, write_images
from tests.support.tiny import TinyNet, same

METHODS = [
    "fedavg",
    "fedbn",
    "silobn",
    "fednn",
    "fedwon",
    "hbn",
    "fedrdn",
    "fedrep(head_epochs=1)",
    "scaffold + fedfn",
    "mixbn",
    "fedexp",
    "spherefed",
    "centralised + fedbn",
    "fedbn + fedrdn + finetune(epochs=1)",
]


def run(folder, method="fedavg", sites=None, model="cnn-small", **settings):
    own = None if isinstance(model, str) else model
    name = model if own is None else f"custom:{type(model).__name__}"
    return execute(recipe(method, model=name, **settings), out=folder, federation=sites or federation(), model=own)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("after")


@pytest.fixture(scope="module")
def runs(root):
    """Each method's run, made when first needed; its federation is an object that no later call gets."""
    made = {}

    def of(method):
        if method not in made:
            made[method] = root / f"run{len(made)}"
            run(made[method], method)
        return made[method]

    return of


@pytest.fixture(scope="module")
def clinic(root):
    return write_images(root / "clinic", {"cat": 6, "dog": 6})


# -- opening ------------------------------------------------------------------------------------------------------
def test_last_and_best_are_the_rounds_that_the_run_recorded(tmp_path):
    result = run(tmp_path / "r", "fedbn", rounds=3)
    last, best = open_run(tmp_path / "r"), open_run(tmp_path / "r", "best")
    assert (last.state.round, best.state.round) == (3, result.best["round"])
    assert same(last.state.model, result._state.model)
    found = evaluate_run(tmp_path / "r", ["personal"], "best", "val", federation())
    assert found["personal/own/val"].mean == result.best["val"]


def test_evaluating_again_gives_what_the_run_recorded(tmp_path):
    modes = ["personal", "unseen", "after_local", "personal/batch"]
    result = run(tmp_path / "r", "fedbn", evaluate=modes)
    again = evaluate_run(tmp_path / "r", None, federation=federation())
    assert set(again) == {k for k in result.history[-1]["scores"] if k.endswith("/test")}
    for name, scores in again.items():
        assert scores.to_dict() == result.history[-1]["scores"][name]
    more = evaluate_run(tmp_path / "r", ["unseen/re-estimated", "personal/re-estimated"], federation=federation())
    assert set(more) == {"unseen/re-estimated/test", "personal/re-estimated/test"}


def test_adapted_can_be_tested_again(runs):
    path = runs("fedbn + fedrdn + finetune(epochs=1)")
    recorded = RunDirectory(path).metrics()[-1]["scores"]["adapted/own/test"]
    assert evaluate_run(path, ["adapted"], federation=federation())["adapted/own/test"].to_dict() == recorded


def test_bad_runs_are_explained(tmp_path, runs):
    path = runs("fedavg")
    with pytest.raises(BadInput, match=r"not a run"):
        open_run(tmp_path)
    with pytest.raises(BadInput, match=r'Expected "last", "best"'):
        open_run(path, "first")
    with pytest.raises(BadInput, match="custom federation"):
        evaluate_run(path)
    with pytest.raises(BadInput, match="has not recorded"):
        evaluate_run(path, ["after_local"], federation=federation())
    with pytest.raises(BadInput, match=r"every site trains.*unseen sites only if"):
        evaluate_run(path, ["unseen"], federation=federation(unseen=False))
    with pytest.raises(BadInput, match="no site"):
        export(path, tmp_path / "x", site="z")
    (tmp_path / "new").mkdir()
    shutil.copy(path / "recipe.toml", tmp_path / "new")
    with pytest.raises(BadInput, match="no checkpoint yet"):
        open_run(tmp_path / "new")


def test_data_that_are_gone_or_changed_stop_evaluation_only(tmp_path, clinic):
    for name, k in (("north", 0), ("south", 2)):
        write_images(tmp_path / "data" / name, {"cat": 6, "dog": 6, "owl": 6}, size=8, k=k)
    folder = f"folder:{tmp_path / 'data'}"
    result = execute(recipe("hbn", federation=folder, rounds=1), out=tmp_path / "r")
    assert evaluate_run(tmp_path / "r")["personal/global/test"].mean == result.accuracy
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / "north" / "cat" / "0.png")
    with pytest.raises(BadInput, match="has changed since"):
        evaluate_run(tmp_path / "r")
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(BadInput, match=r"needs its data.*not a folder"):
        evaluate_run(tmp_path / "r")
    export(tmp_path / "r", tmp_path / "x", site="south")
    assert len(predict(tmp_path / "r", [clinic])) == 12
    assert adapt(tmp_path / "r", clinic).after is not None


def test_no_validation_data_means_no_best_round(tmp_path):
    run(tmp_path / "r", sites=federation(val=False), rounds=1)
    with pytest.raises(BadInput, match="validation data"):
        open_run(tmp_path / "r", "best")


def test_a_custom_model_must_be_passed_again(tmp_path):
    run(tmp_path / "r", model=TinyNet(), rounds=1)
    with pytest.raises(BadInput, match="custom model"):
        export(tmp_path / "r", tmp_path / "x")
    with pytest.raises(BadInput, match="not the one of run"):
        export(tmp_path / "r", tmp_path / "x", model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    export(tmp_path / "r", tmp_path / "x", model=TinyNet())
    about = json.loads((tmp_path / "x" / "model.json").read_text())
    assert not about["needs"]["fednorms"]
    with pytest.raises(BadInput, match="load_model"):
        load_model(tmp_path / "x")
    mine = TinyNet()  # without fednorms
    mine.load_state_dict(load_file(tmp_path / "x" / "model.safetensors"))
    x = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        expected = mine.eval()((x - 0.5) / 0.5)
    assert torch.equal(load_model(tmp_path / "x", TinyNet()).logits(x), expected)


@pytest.mark.parametrize("method", ["fedbn", "ditto", "apfl", "pfedme"])
def test_a_client_that_never_trained_has_no_model(method, tmp_path):
    run(tmp_path / "r", method, rounds=1, participation="fixed:1")
    names = open_run(tmp_path / "r").clients
    idle = next(n for n in "abc" if n not in names)
    with pytest.raises(BadInput, match="has not trained yet"):
        export(tmp_path / "r", tmp_path / "x", site=idle)


# -- exporting ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_an_export_gives_the_runs_own_logits(method, runs, root):
    path = runs(method)
    x = federation().site("b").test.x
    opened = open_run(path)
    personal = averages(opened.task) and len(opened.facts.clients) > 1
    for site in (None, "b"):
        out = root / f"{path.name}-{site}"
        done = export(path, out, site=site, averaged=site is None and personal)
        one = "model.pt2" if "fednn" in method else "load.py"
        assert {p.name for p in done.paths} == {"model.safetensors", "model.json", "README.txt", "MODEL_CARD.md", one}
        assert {p.name for p in done.paths} == {p.name for p in out.iterdir()}
        assert len((out / "README.txt").read_text().splitlines()) == 5
        model = load_model(out)
        assert model.classes == tuple(CLASSES)
        torch.testing.assert_close(model(x).sum(1), torch.ones(len(x)))
        assert same(dict(model.module.state_dict()), load_file(out / "model.safetensors"))
    # The site's model scores as the run's own personal evaluation does.
    score = evaluate_run(path, ["personal"], federation=federation())
    y = federation().site("b").test.y
    right = (model(x).argmax(1) == y).double().mean()
    assert next(iter(score.values())).sites["b"].accuracy == right


def test_without_a_site_the_mean_of_what_clients_keep_is_exported(runs, root):
    out = export(runs("fedbn"), root / "mean", averaged=True)
    assert any("mean over 3 clients" in note for note in out.notes)
    states = open_run(runs("fedbn")).clients
    found = load_file(root / "mean" / "model.safetensors")["norm1.running_mean"]
    torch.testing.assert_close(found, torch.stack([states[n].local["norm1.running_mean"] for n in "abc"]).mean(0))


def test_fedrdn_bakes_in_the_sites_statistics_or_measures_them(runs, root):
    x = federation().site("b").test.x
    export(runs("fedrdn"), root / "rdn-b", site="b")
    train = federation().site("b").train.x.float() / 255
    fixed = load_model(root / "rdn-b").preprocessing
    torch.testing.assert_close(torch.tensor(fixed.mean), train.mean((2, 3)).mean(0))
    torch.testing.assert_close(torch.tensor(fixed.std), train.flatten(2).std(2).mean(0))
    assert export(runs("fedrdn"), root / "rdn").notes
    free = load_model(root / "rdn")
    unit = x.float() / 255
    by_hand = (unit - unit.mean((2, 3)).mean(0).view(-1, 1, 1)) / unit.flatten(2).std(2).mean(0).view(-1, 1, 1)
    torch.testing.assert_close(free.prepare(x), by_hand)
    assert torch.equal(free.measured(x).logits(x), free.logits(x))
    # Once measured, an image's prediction does not depend on the others.
    known = free.measured(x)
    torch.testing.assert_close(known.logits(x[:1]), known.logits(x)[:1])


def test_needs_says_which_layers_are_ours(runs, root):
    for method, layers in (
        ("fedavg", []),
        ("fednn", ["fednorms.layers.AdaptiveGroupNorm"]),
    ):
        out = root / f"needs-{method}"
        export(runs(method), out)
        needs = json.loads((out / "model.json").read_text())["needs"]
        assert needs["layers"] == layers
        assert not needs["fednorms"]
        assert bool(needs["why"]) == bool(layers)
        assert "import fednorms" not in needs["load_without_fednorms"]


def test_export_refuses_a_directory_that_holds_something(runs, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(BadInput, match="not empty"):
        export(runs("fedavg"), tmp_path / "full")
    with pytest.raises(BadInput, match="is a file"):
        export(runs("fedavg"), tmp_path / "full" / "thesis.tex")
    (tmp_path / "empty").mkdir()
    export(runs("fedavg"), tmp_path / "empty")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("step", ["save_file", "readme", "card", "_verify"])
def test_nothing_is_left_behind_when_writing_fails(step, runs, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, step, full)
    with pytest.raises(RunFailed, match="Nothing was written"):
        export(runs("fedavg"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_reproduced_is_not_written(tmp_path):
    class Restless(TinyNet):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x) + self.calls

    run(tmp_path / "r", model=Restless(), rounds=1)
    with pytest.raises(RunFailed, match="differ from the run's"):
        export(tmp_path / "r", tmp_path / "x", model=Restless())
    assert not (tmp_path / "x").exists()


def test_onnx_says_what_to_install(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'fednorms\[onnx\]'"):
        export(runs("fedavg"), tmp_path / "x", onnx=True)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnx, onnxscript and onnxruntime")
@pytest.mark.parametrize("method", ["fedbn", "fednn", "fedrdn"])
def test_onnx_takes_bytes_and_agrees(method, runs, tmp_path):
    import onnxruntime

    export(runs(method), tmp_path / "x", site="b", onnx=True)
    x = federation().site("b").test.x
    session = onnxruntime.InferenceSession(tmp_path / "x" / "model.onnx", providers=["CPUExecutionProvider"])
    logits, probabilities = map(torch.from_numpy, session.run(None, {"images": x.numpy()}))
    model = load_model(tmp_path / "x")
    torch.testing.assert_close(logits, model.logits(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(probabilities, model(x), rtol=1e-3, atol=1e-4)


def test_damaged_exports_are_explained(runs, tmp_path):
    export(runs("fedavg"), tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(BadInput, match=r"model\.safetensors is damaged"):
        load_model(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"Cannot read .*model\.safetensors"):
        load_model(tmp_path / "x")
    (tmp_path / "x" / "model.json").write_text('{"format": 99}')
    with pytest.raises(BadInput, match="format 99"):
        load_model(tmp_path / "x")


def test_a_loaded_model_checks_its_images(runs, root):
    export(runs("fedavg"), root / "checks")
    model = load_model(root / "checks")
    x = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model.logits(x), model.logits(x.float() / 255))
    with pytest.raises(BadInput, match="N x 3 x 8 x 8"):
        model(torch.zeros(2, 3, 9, 9))
    assert "all sites" in repr(model)
    with pytest.raises(BadInput, match=r"must be a tensor of N x 3 x 8 x 8.*got ndarray"):
        model(torch.zeros(2, 3, 8, 8).numpy())
    with pytest.raises(BadInput, match="from 0 to 1, got values up to 200"):
        model(torch.full((2, 3, 8, 8), 200.0))


# -- predicting ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn", "fednn"])
def test_predictions_are_those_of_the_exported_model(method, runs, root, clinic, tmp_path):
    export(runs(method), tmp_path / "x", site="a")
    found = predict(runs(method), [clinic], site="a")
    assert [p.file.parent.name for p in found] == ["cat"] * 6 + ["dog"] * 6
    model = load_model(tmp_path / "x")
    for p in found:
        with Image.open(p.file) as image:
            pixels = torch.frombuffer(
                bytearray(image.resize((8, 8), Image.Resampling.BILINEAR).tobytes()), dtype=torch.uint8
            )
        row = model(pixels.view(1, 8, 8, 3).permute(0, 3, 1, 2))[0]
        torch.testing.assert_close(
            torch.tensor(list(p.probabilities.values()), dtype=torch.float32), row, atol=1e-5, rtol=1e-4
        )
        assert p.label == CLASSES[int(row.argmax())]
        assert p.probability == max(p.probabilities.values())


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedwon", "fedrdn"])
def test_an_exported_or_adapted_model_predicts_too(method, runs, clinic, tmp_path):
    for site in (None, "a"):
        averaged = site is None and method == "fedbn"
        export(runs(method), tmp_path / f"{site}", site=site, averaged=averaged)
        of_run = predict(runs(method), [clinic], site, averaged=averaged)
        of_export = predict(tmp_path / f"{site}", [clinic])
        assert [p.file for p in of_export] == [p.file for p in of_run]
        one, other = ([list(p.probabilities.values()) for p in found] for found in (of_run, of_export))
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-6, rtol=1e-5)
    done = adapt(runs(method), clinic, out=tmp_path / "adapted", epochs=1, test=0.0)
    assert {p.label for p in predict(done.path, [clinic / "cat"])} <= set(CLASSES)


def test_an_exported_model_has_no_site_or_round_to_choose(runs, clinic, tmp_path):
    export(runs("fedbn"), tmp_path / "x", site="a")
    with pytest.raises(BadInput, match='one exported model and has no site "b"'):
        predict(tmp_path / "x", [clinic], site="b")
    with pytest.raises(BadInput, match='has no round "best"'):
        predict(tmp_path / "x", [clinic], which="best")


def test_statistics_that_only_a_test_measures_are_reported(tmp_path, clinic):
    fn.run("adabn", federation(), rounds=1, out=tmp_path / "run")
    for site in (None, "a"):
        said = "measured on the site's own images. This model has averaged ones"
        assert said in predict(tmp_path / "run", [clinic], site)[0].note
        assert any(said in note for note in export(tmp_path / "run", tmp_path / f"{site}", site=site).notes)
    assert not any(said in note for note in adapt(tmp_path / "run", clinic).notes)


def test_predicting_without_a_site_says_what_it_did(runs, clinic):
    assert "mean over 3 clients" in predict(runs("fedbn"), [clinic / "cat"], averaged=True)[0].note
    assert "statistics of these 6 images" in predict(runs("fedrdn"), [clinic / "cat"])[0].note
    note = predict(runs("fedavg"), [clinic / "cat" / "0.png"])[0].note
    assert note.startswith("Accuracy ")
    assert '"global/global", round 2' in note


def test_files_that_cannot_be_used_are_named(runs, clinic, tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("broken.png", "deep/worse.jpg"):
        (tmp_path / "in" / name).write_bytes(b"not an image")
    shutil.copy(clinic / "cat" / "0.png", tmp_path / "in" / "fine.png")
    with pytest.raises(BadInput, match=r"(?s)2 image.*broken.png.*worse.jpg.*skip_broken=True"):
        predict(runs("fedavg"), [tmp_path / "in"])
    export(runs("fedavg"), tmp_path / "model")
    for path in (runs("fedavg"), tmp_path / "model"):
        [one] = predict(path, [tmp_path / "in"], skip_broken=True)
        assert one.probabilities == predict(path, [tmp_path / "in" / "fine.png"])[0].probabilities
        assert re.search(r"2 images skipped: .*broken.png.*worse.jpg", one.note)
    with pytest.raises(BadInput, match="1 image cannot be used"):
        predict(runs("fedavg"), [tmp_path / "in" / "broken.png"], skip_broken=True)
    (tmp_path / "none").mkdir()
    with pytest.raises(BadInput, match=r"(?s)no images in this folder.*gone.png: no such file"):
        predict(runs("fedavg"), [tmp_path / "none", tmp_path / "gone.png"])
    with pytest.raises(BadInput, match="Name files or folders"):
        predict(runs("fedavg"), [])


# -- adapting -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_a_new_site_gets_a_model(method, runs, clinic, tmp_path):
    done = adapt(runs(method), clinic, out=tmp_path / "x", epochs=1, lr=0.01)
    assert done.samples == {"train": 8, "test": 4}
    assert all(s.samples == 4 for s in (done.before, done.after, done.fine_tuned))
    again = adapt(runs(method), clinic, epochs=1, lr=0.01)
    assert [again.before, again.after, again.fine_tuned] == [done.before, done.after, done.fine_tuned]
    site = fn.data.site_from_folder(clinic, CLASSES, 8, test=0.3)
    model = load_model(tmp_path / "x")
    right = (model(site.test.x).argmax(1) == site.test.y).double().mean()
    assert done.fine_tuned.accuracy == right
    about = json.loads((tmp_path / "x" / "model.json").read_text())
    assert about["trained"]["site"] == "clinic"
    assert (about["adapted"]["images"], about["adapted"]["epochs"]) == (8, 1)
    assert about["adapted"]["before"] == done.before.to_dict()
    assert about["adapted"]["after"] == done.fine_tuned.to_dict()
    assert done.gain.value == pytest.approx(done.fine_tuned.accuracy - done.before.accuracy)
    assert done.gain.low <= done.gain.value <= done.gain.high
    assert " points [" in repr(done)
    assert "saved in" in repr(done)
    assert "the model was not saved" in repr(again)


def test_few_patients_or_one_class_show_no_gain():
    worse, better = SiteScore(0.0, 0.0, 1.0, 9, [0.0, math.nan]), SiteScore(1.0, 1.0, 0.1, 9, [1.0, math.nan])
    done = Adapted("clinic", worse, better, None, {"train": 9, "test": 9}, gain=Interval(1.0, 0.7, 1.0))
    assert "no verdict, because the 9 test images are of one class" in repr(done)
    assert "better than before" not in repr(done)
    few = replace(done, gain=Interval(1.0, 0.0, 1.0), patients=3)
    assert "no difference that 9 test images of 3 patients can show" in repr(few)


def test_without_epochs_only_statistics_change(runs, clinic, tmp_path):
    export(runs("fedbn"), tmp_path / "start", averaged=True)
    done = adapt(runs("fedbn"), clinic, out=tmp_path / "x")
    start, after = (load_file(tmp_path / n / "model.safetensors") for n in ("start", "x"))
    changed = {n for n in start if not torch.equal(start[n], after[n])}
    assert changed == {n for n in start if n.endswith(("running_mean", "running_var"))}
    assert done.fine_tuned is None
    assert "mean over 3 clients" in done.notes[0]
    assert done.to_dict()["fine_tuned"] is None


def test_nothing_to_re_estimate_is_reported(runs, clinic):
    done = adapt(runs("fedwon"), clinic)
    assert done.before == done.after
    assert "no statistics to re-estimate" in done.notes[-1]
    assert "nothing was adapted" in repr(done)


def test_fine_tuning_moves_the_frozen_head_too(tmp_path, clinic):
    run(tmp_path / "r", "fedbabu(epochs=1)", rounds=1)
    export(tmp_path / "r", tmp_path / "start")
    adapt(tmp_path / "r", clinic, out=tmp_path / "x", epochs=1, lr=0.1)
    start, after = (load_file(tmp_path / n / "model.safetensors") for n in ("start", "x"))
    assert not torch.equal(start["head.weight"], after["head.weight"])


def test_adapt_explains_bad_folders_and_options(runs, tmp_path):
    with pytest.raises(BadInput, match=r"(?s)wolf.*cat.*dog.*owl"):
        adapt(runs("fedavg"), write_images(tmp_path / "zoo", {"wolf": 3}))
    with pytest.raises(BadInput, match="not a folder"):
        adapt(runs("fedavg"), tmp_path / "nowhere")
    with pytest.raises(BadInput, match="epochs and lr"):
        adapt(runs("fedavg"), tmp_path / "zoo", epochs=-1)


def test_no_patient_is_both_adapted_to_and_tested(tmp_path):
    """With a group all images of a patient are on one side; by default it is that of the run's own folders."""

    def patients(folder, classes):
        """Five images of each class are Ann's, the sixth is Ben's."""
        for path in write_images(folder, dict.fromkeys(classes, 6)).rglob("*.png"):
            path.rename(path.with_name(f"{'ben' if path.stem == '5' else 'ann'}-{path.stem}.png"))
        return folder

    for site in ("a", "b"):
        patients(tmp_path / "sites" / site, CLASSES)
    divided = {"group": "[a-z]+", "val": 0.0}
    execute(recipe("fedavg", federation=f"folder:{tmp_path / 'sites'}", data=divided, rounds=1), out=tmp_path / "run")
    clinic = patients(tmp_path / "clinic", CLASSES[:2])
    assert adapt(tmp_path / "run", clinic).samples == {"train": 10, "test": 2}  # Ann, Ben
    assert adapt(tmp_path / "run", clinic, group="").samples == {"train": 8, "test": 4}
    assert adapt(tmp_path / "run", clinic, group="[0-9]").samples == {"train": 8, "test": 4}  # two of six numbers
    with pytest.raises(BadInput, match="too few at every site"):
        adapt(tmp_path / "run", clinic, group="png")
    (clinic / CLASSES[0] / "ben-5.png").rename(clinic / CLASSES[0] / "5.PNG")
    with pytest.raises(BadInput, match=r"matches nothing in 1 of 12.*is that of the run"):
        adapt(tmp_path / "run", clinic)
    assert adapt(tmp_path / "run", clinic, test=0.0).samples == {"train": 12}  # nothing is divided


def test_a_folder_may_have_its_own_split_and_no_test_images(runs, tmp_path):
    write_images(tmp_path / "own" / "train", {"cat": 4, "owl": 3})
    write_images(tmp_path / "own" / "test", {"owl": 2})
    assert adapt(runs("fedavg"), tmp_path / "own").samples == {"train": 7, "test": 2}
    done = adapt(runs("fedavg"), tmp_path / "own" / "train", test=0)
    assert (done.before, done.after) == (None, None)
    assert "nothing was tested" in done.notes[-1]


def test_one_folder_may_be_given_without_a_list(tmp_path):
    """Its letters are not paths: "/" is the whole file system."""
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "one.png")
    assert image_files(str(tmp_path / "a")) == image_files([tmp_path / "a"]) == [tmp_path / "a" / "one.png"]
