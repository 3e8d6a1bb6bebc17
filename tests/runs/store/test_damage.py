"""Damage that nothing else would notice (one changed number, one flipped bit, one deleted file) is found when read."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import fednorms as fn
from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.runs.driver import execute
from fednorms.runs.store.clients import ClientStore
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.store.seal import check_tensors, has_seal, sealed_tensors
from tests.support.after import federation, recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    execute(recipe("scaffold", rounds=3), out=folder, federation=federation())
    return folder


@pytest.fixture
def run(made, tmp_path):
    return RunDirectory(shutil.copytree(made, tmp_path / "run"))


def changed(path, edit):
    """Edit a JSON file as damage would: its hash stays as it was."""
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def resume(run):
    return fn.resume(run.path, federation=federation())


def test_a_changed_federation_json_is_found_and_resume_writes_it_again(run):
    before = run.facts_path.read_bytes()
    changed(run.facts_path, lambda facts: facts["classes"].reverse())
    with pytest.raises(RunFailed, match=r"federation\.json \(its content hash differs\)\. Remove it and run .*resume"):
        fn.open_run(run.path)
    resume(run)
    assert run.facts_path.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"name": "x"', '{"preprocessing": null}', 2000 * "[", '{"shape": [1]}']
)
def test_a_federation_json_that_cannot_be_read_is_one_message(run, text):
    run.facts_path.write_text(text)
    with pytest.raises(RunFailed, match=r"Cannot read .*federation\.json"):
        fn.open_run(run.path)


def test_files_of_version_0_1_have_no_hash_and_are_read(run):
    for path in (run.facts_path, run.summary_path):
        changed(path, lambda values: values.pop("hash"))
    assert fn.open_run(run.path).state.round == 3
    assert run.summary()["rounds"] == 3


@pytest.mark.parametrize("row", [0, 2])
def test_changed_metrics_are_found_when_the_run_continues(run, row):
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    values = json.loads(lines[row])
    values["train_loss"] /= 2
    lines[row] = json.dumps(values) + "\n"
    run.metrics_path.write_text("".join(lines))
    with pytest.raises(RunFailed, match=r"metrics\.jsonl is damaged.*delete it to continue without these rows"):
        resume(run)
    assert run.metrics_path.read_text() == "".join(lines)


def test_missing_rows_are_damage_and_a_missing_file_is_a_note(run):
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    run.metrics_path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(RunFailed, match=r"metrics\.jsonl is damaged"):
        resume(run)
    run.metrics_path.unlink()
    assert any("metrics.jsonl is missing" in note for note in resume(run).notes)


def test_times_and_rows_after_the_checkpoint_are_not_covered(run):
    rows = run.metrics()
    run.metrics_path.write_text("".join(json.dumps({**row, "seconds": 0}) + "\n" for row in [*rows, {"round": 4}]))
    assert len(resume(run).history) == 3


def test_a_mark_is_the_same_whether_rows_were_read_or_appended(tmp_path):
    appended, read = RunDirectory(tmp_path), RunDirectory(tmp_path)
    appended.metrics_mark()
    for number in range(4):
        appended.append_metrics({"round": number, "loss": float("nan"), "seconds": number})
    assert appended.metrics_mark() == read.metrics_mark()
    appended.cut_metrics(2)
    assert appended.metrics_mark() == RunDirectory(tmp_path).metrics_mark() != read.metrics_mark()


def test_a_deleted_last_manifest_is_not_called_the_last_round(run):
    last = run.checkpoints / "round-000003" / "manifest.json"
    before = last.read_bytes()
    last.unlink()
    with pytest.raises(RunFailed, match=r"ended after round 3, but its newest checkpoint is of round 2.*resume"):
        fn.open_run(run.path)
    assert fn.open_run(run.path, which=2).state.round == 2
    resume(run)
    assert last.read_bytes() == before
    assert fn.open_run(run.path).state.round == 3


def test_a_run_that_was_interrupted_is_still_opened_at_its_last_checkpoint(run):
    (run.checkpoints / "round-000003" / "manifest.json").unlink()
    run.summary_path.unlink()
    assert fn.open_run(run.path).state.round == 2


def test_a_changed_recipe_is_said(run):
    run.recipe.write_text(run.recipe.read_text().replace("lr = 0.05", "lr = 0.04"))
    assert any("recipe.toml has changed" in note for note in fn.open_run(run.path).notes)
    assert any("recipe.toml has changed" in note for note in resume(run).notes)


def test_a_deleted_best_manifest_is_said(run):
    (run.checkpoints / "best" / "manifest.json").unlink()
    with pytest.raises(RunFailed, match="has lost its best model"):
        fn.open_run(run.path, which="best")


def test_a_changed_summary_is_found(run):
    changed(run.summary_path, lambda values: values.update(rounds=2))
    with pytest.raises(RunFailed, match=r"summary\.json \(its content hash differs\)"):
        run.summary()


# -- exports --


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    fn.export(made, folder)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_no_flipped_bit_of_an_export_changes_a_prediction(exported, tmp_path, name):
    images = torch.randint(256, (2, *fn.load_model(exported).shape), dtype=torch.uint8)
    expected, draw = fn.load_model(exported)(images), random.Random(0)
    copy = shutil.copytree(exported, tmp_path / "model")
    data, said = (exported / name).read_bytes(), []
    for _ in range(25):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        (copy / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            found = fn.load_model(copy)
        except BadInput as error:
            said.append(name in str(error))
        else:
            assert name == "model.json"  # a blank between two entries
            assert torch.equal(found(images), expected)
    assert said
    assert all(said)


def test_an_export_that_was_edited_deliberately_can_be_read(exported, tmp_path):
    copy = shutil.copytree(exported, tmp_path / "model")
    changed(copy / "model.json", lambda about: about["classes"].reverse())
    with pytest.raises(BadInput, match=r'model\.json is damaged.*remove its entry "hash"'):
        fn.load_model(copy)
    changed(copy / "model.json", lambda about: about.pop("hash"))
    assert fn.load_model(copy).classes == fn.load_model(exported).classes[::-1]


# -- states of clients --


def test_a_spilled_state_that_changed_is_an_error(tmp_path):
    store = ClientStore(limit_bytes=0, spill=tmp_path)
    store.put("a", ClientState(1, Tree(w=torch.ones(4)), {}))
    (file,) = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunFailed, match=r'state of client "a" .*its content has changed'):
        store["a"]


def test_every_byte_of_sealed_tensors_counts():
    plain = save({"w": torch.arange(3.0), "b": torch.zeros(0)}, {"fednorms": "{}"})
    data = sealed_tensors(plain)
    assert load(data).keys() == load(plain).keys()
    assert sealed_tensors(data) == data
    assert has_seal(data)
    assert not has_seal(plain)
    check_tensors(plain)  # of version 0.1
    for at in range(len(data)):
        bad = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        try:
            check_tensors(bad)
            found = load(bad)
        except (ValueError, SafetensorError):
            continue
        assert all(torch.equal(found[k], v) for k, v in load(data).items())  # the word "hash", or a blank in between
