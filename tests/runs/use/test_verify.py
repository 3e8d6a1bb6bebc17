"""`verify` finds every damaged file of runs, exports, packs and comparisons, and blames no other."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest

import fednorms as fn
from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.data.pack import pack
from fednorms.runs.driver import execute
from fednorms.runs.store.checkpoint import load
from fednorms.runs.store.seal import hash_of
from tests.support.after import federation, recipe

V0_1 = Path(__file__).parents[2] / "fixtures" / "v0_1"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run, an exported model, a pack and a text."""
    root = tmp_path_factory.mktemp("verify") / "all"
    execute(recipe("scaffold", rounds=3), out=root / "run", federation=federation())
    fn.export(root / "run", root / "model")
    pack(federation(), root / "data.fnpack")
    (root / "notes.txt").write_text("mine")
    return root


def states(path):
    return {str(f.path.relative_to(path)): f.state for f in fn.verify(path).files}


def test_what_was_just_written_is_intact(made):
    found = states(made)
    uncovered = {"notes.txt", "run/.lock", "model/MODEL_CARD.md"}
    assert {name for name, state in found.items() if state == "not covered"} == uncovered
    assert set(found.values()) == {"intact", "not covered"}
    files = {str(Path(folder, name).relative_to(made)) for folder, _, names in os.walk(made) for name in names}
    assert found.keys() == files


def test_every_flipped_bit_is_found_and_no_other_file_is_blamed(made, tmp_path):
    copy, draw = shutil.copytree(made, tmp_path / "all"), random.Random(1)
    for name, state in states(made).items():
        if state == "not covered":
            continue
        data = (copy / name).read_bytes()
        blank = True
        while blank:  # one between two entries of JSON or TOML says nothing, and times are not covered
            at = draw.randrange(len(data))
            bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            blank = name.endswith(("json", "jsonl", "toml")) and _plain(name, bad) == _plain(name, data)
        (copy / name).write_bytes(bad)
        found = [str(f.path.relative_to(copy)) for f in fn.verify(copy).damaged]
        assert name in found, at
        if not name.endswith(("manifest.json", "model.json")):
            assert found == [name]
        (copy / name).write_bytes(data)


def _plain(name, data):
    try:
        if name.endswith("toml"):
            return fn.Recipe.from_toml(data.decode()).model_dump()
        rows = [json.loads(part) for part in (data.splitlines() if name.endswith("jsonl") else [data])]
        return [{k: v for k, v in row.items() if k not in ("seconds", "hash")} for row in rows]
    except (ValueError, AttributeError):
        return None


@pytest.mark.parametrize(
    "name",
    [
        "run/checkpoints/round-000003/manifest.json",
        "run/checkpoints/round-000003/server.safetensors",
        "run/checkpoints/best/manifest.json",
        "run/metrics.jsonl",
        "run/federation.json",
        "model/model.safetensors",
    ],
)
def test_a_deleted_file_is_damage(made, tmp_path, name):
    copy = shutil.copytree(made, tmp_path / "all")
    (copy / name).unlink()
    assert name in [str(f.path.relative_to(copy)) for f in fn.verify(copy).damaged]


def test_a_link_out_of_a_run_is_damage(made, tmp_path):
    copy = shutil.copytree(made, tmp_path / "all")
    (copy / "run" / "spill").symlink_to(tmp_path)
    assert next(f.why for f in fn.verify(copy / "run").damaged).startswith(f"{copy / 'run' / 'spill'} is a link to")


def test_a_manifest_cannot_name_a_file_outside(made, tmp_path):
    copy = shutil.copytree(made / "run", tmp_path / "run")
    for manifest in copy.glob("checkpoints/round-*/manifest.json"):
        body = json.loads(manifest.read_text())
        del body["hash"]
        body["server"]["path"] = "../../outside.safetensors"
        manifest.write_text(json.dumps({"hash": hash_of(json.dumps(body).encode()), **body}))
    assert "names a file outside of the run" in fn.verify(copy).damaged[0].why
    with pytest.raises(fn.RunFailed, match="names a file outside of the run"):
        load(copy / "checkpoints")


def test_what_version_0_1_wrote_is_not_blamed():
    found = fn.verify(V0_1)
    assert found.files
    assert not found.damaged


def test_nothing_is_written(made):
    def seen():
        return {p: hashlib.sha1(p.read_bytes()).digest() for p in made.rglob("*") if p.is_file()}, os.listdir(made)

    before = seen()
    fn.verify(made)
    assert seen() == before


def test_the_command(made, tmp_path, capsys):
    assert main(["verify", str(made)]) == 0
    assert "intact, 3 not covered, 0 damaged" in capsys.readouterr().out.splitlines()[0]
    assert main(["verify", str(made / "data.fnpack"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["state"] == "intact"
    copy = shutil.copytree(made / "model", tmp_path / "model")
    (copy / "model.safetensors").write_bytes(b"no")
    assert main(["verify", str(copy)]) == 1
    assert "damaged     model.safetensors: its content hash differs" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    with pytest.raises(BadInput, match="has no content hash"):
        fn.verify(made / "notes.txt")


def test_a_folder_without_anything_to_verify_is_said(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for name, why in (("empty", "it is empty"), ("other", "no file in it has a content hash")):
        for more in ([], ["--json"]):
            assert main(["verify", str(tmp_path / name), *more]) == 2
            said = capsys.readouterr()
            assert f"Nothing to verify in {tmp_path / name}: {why}." in said.err.replace("\n", " ")
            assert said.out == "" or more
