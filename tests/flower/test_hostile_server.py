"""A server, or a run on it, that asks a site for more than it should: nothing is imported, opened or told."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import json
import sys

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from fednorms.core.states import Broadcast
from fednorms.core.tree import Tree
from fednorms.flower import messages
from fednorms.flower.agreement import read_agreement
from fednorms.flower.client import client_app
from fednorms.runs.assemble import assemble
from fednorms.runs.recipe import Recipe

ABOUT_ALL = json.dumps(
    {
        "classes": ["cat", "dog"],
        "shape": [3, 8, 8],
        "dtype": "uint8",
        "preprocessing": {"mean": [0.5] * 3, "std": [0.5] * 3, "crop": None},
        "clients": 2,
        "samples": 100,
        "counts": [],
        "protocol": {},
    }
)
RUN = {"federation": "custom:at the sites", "deploy.classes": "cat,dog", "deploy.minimum": 1, "rounds": 2, "threads": 1}


@pytest.fixture
def site(tmp_path):
    """Ask a site in this process; returns the words and the scores of its reply."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"JaneDoe_{i}.png")
    node = {"site": "north", "state": str(tmp_path / "state"), "policy": str(tmp_path / "policy.toml")}

    def ask(kind, asked, *, policy="", data=True, **words):
        (tmp_path / "policy.toml").write_text(policy)
        given = {**RUN, "method": "gn", "model": "cnn-small", **asked}
        config = node | ({"data": str(tmp_path / "images")} if data else {})
        content = RecordDict({messages.ABOUT: ConfigRecord({})})
        if kind != "query.hello":
            start = assemble(
                Recipe(method=given["method"], rounds=2), read_agreement(ABOUT_ALL), deployed=True
            ).net.initial
            words = {"agreement": ABOUT_ALL, "accepted": -1, **words}
            content = messages.pack_broadcast(Broadcast(words.pop("round", 0), start, {}), start, Tree(), words)
        message = Message(content, 100, kind)
        message.metadata.__dict__["_message_id"] = "x"
        message.metadata.__dict__["_src_node_id"] = 1
        reply = client_app()(message, Context(1, 100, config, RecordDict(), given)).content
        return dict(reply[messages.ABOUT]), {label: dict(found) for label, found in reply.metric_records.items()}

    return ask


@pytest.mark.parametrize("kind", ["query.hello", "train", "evaluate"])
@pytest.mark.parametrize("policy", ["", "statistics = false"])
def test_no_module_that_a_run_names_is_imported(kind, policy, site, tmp_path, monkeypatch):
    (tmp_path / "named_by_the_run.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    words, _ = site(kind, {"model": "named_by_the_run:Net"}, policy=policy)
    assert "names code to import" in words["reason"]
    assert "named_by_the_run" not in sys.modules


@pytest.mark.parametrize("kind", ["query.hello", "train"])
def test_names_of_files_never_leave(kind, site):
    words, _ = site(kind, {"data.group": "(zzz)"})
    assert words["reason"] == "This site's data cannot be opened with the run's settings; its log says why."
    words, _ = site(kind, {"data.group": "(JaneDoe)"})  # the same answer: nobody can ask for names one by one
    assert words["reason"] == "This site's data cannot be opened with the run's settings; its log says why."
    words, _ = site(kind, {"data.group": "(zzz)"}, policy='require = ["dplocal"]')
    assert words["reason"] == "This site's policy refuses the run: dplocal is required."


@pytest.mark.parametrize("kind", ["query.hello", "train"])
def test_an_unexpected_error_names_no_file_either(kind, site, monkeypatch):
    def fails(*args, **options):
        raise PermissionError(13, "Permission denied", "/images/cat/JaneDoe_3.png")

    monkeypatch.setattr("fednorms.flower.site.site_from_folder", fails)
    words, _ = site(kind, {})
    assert words["reason"] == "This site's data cannot be opened with the run's settings; its log says why."


def test_training_images_are_not_scored(site):
    _, scores = site("evaluate", {}, tests=["global/train", "global/test"], round=1)
    assert set(scores) == {"global/test"}


def test_messages_of_other_rounds_are_not_answered(site):
    words, scores = site("evaluate", {}, policy="messages_per_round = 1", tests=["global/test"], round=999)
    assert "Round 999 is not one of the 2 rounds" in words["reason"]
    assert not scores


@pytest.mark.parametrize(("policy", "told"), [("", True), ("scores = false", False)])
def test_the_training_loss_is_a_score(policy, told, site):
    """With a crafted model it tells how many images each class has."""
    _, scores = site("train", {"training.steps": 1}, policy=policy)
    assert bool(scores["metrics"]) is told


@pytest.mark.parametrize("asked", [{"federation": "folder:/etc"}, {"federation": "digits-shift", "data.root": "/etc"}])
def test_a_run_does_not_choose_a_sites_files(asked, site):
    words, _ = site("query.hello", asked, data=False)
    assert words["reason"] == "This site's data cannot be opened with the run's settings; its log says why."
