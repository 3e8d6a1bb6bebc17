"""Runs that keep every checkpoint: any round can be opened, and the next one repeated."""

from __future__ import annotations

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.round import broadcast, server_update
from fednorms.runs.store.checkpoint import kept_rounds
from tests.support.kept import SMALL, kept
from tests.support.tables import table


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedbn"])
def test_a_round_repeated_from_the_one_before_is_the_same_round(tmp_path, method):
    path = kept(tmp_path / "run", method, 4, participation="fixed:3")
    assert kept_rounds(path / "checkpoints") == [0, 1, 2, 3, 4]  # the initial state, too
    for t in (0, 1, 2):
        before, after = (fn.open_run(path, which=at) for at in (t, t + 1))
        assert (before.state.round, after.state.round) == (t, t + 1)
        first, second = before.next_round().models, before.next_round().models  # client states are not used up
        assert len(first) == 3
        assert all(torch.equal(first[c][k], second[c][k]) for c in first for k in first[c])
        engine = before.session.engine
        uploads = engine.train(broadcast(before.task, before.state), list(first)).uploads
        assert all(torch.equal(u.model[k], first[u.client][k]) for u in uploads for k in u.model)
        made = server_update(before.task, before.state, uploads).model
        assert all(torch.equal(made[k], after.state.model[k]) for k in made)
        assert all(torch.equal(t, after.state.model[k]) for k, t in before.next_round().state.model.items())
        kept_back = [n for n in before.task.net.own if n not in before.task.net.exchanged]
        for name in first:  # with what a client keeps to itself
            assert all(torch.equal(first[name][k], after.clients[name].local[k]) for k in kept_back)


def test_sparser_checkpoints_and_missing_rounds(tmp_path):
    path = kept(tmp_path / "run", "fedavg", 4, checkpoint_every=3)
    assert kept_rounds(path / "checkpoints") == [0, 3, 4]
    with pytest.raises(BadInput, match=r"no checkpoint of round 2. It has: 0, 3, 4"):
        fn.open_run(path, which=2)
    with pytest.raises(BadInput, match="Unknown round"):
        fn.open_run(path, which="first")


def test_a_damaged_round_is_named_and_the_others_open(tmp_path):
    path = kept(tmp_path / "run", "fedavg", 4)
    file = path / "checkpoints/round-000002/server.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunFailed, match=r"checkpoint of round 2 .*is damaged"):
        fn.open_run(path, which=2)
    assert fn.open_run(path, which=3).state.round == 3


def test_by_default_the_newest_two_stay(tmp_path):
    fn.run(recipe=fn.Recipe.make(SMALL | {"method": "fedavg", "rounds": 4}), out=tmp_path / "run")
    assert kept_rounds(tmp_path / "run" / "checkpoints") == [3, 4]


def test_a_run_can_leave_the_best_model_out(tmp_path):
    recipe = SMALL | {"method": "fedavg", "rounds": 3, "keep_checkpoints": "resume"}
    result = fn.run(recipe=fn.Recipe.make(recipe), out=tmp_path / "run")
    assert result.best is not None
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()
    assert fn.open_run(tmp_path / "run").state.round == 3
    with pytest.raises(BadInput, match=r'kept no best model.*keep_checkpoints="resume"'):
        fn.open_run(tmp_path / "run", which="best")


def test_a_setting_that_stores_rounds_keeps_them(tmp_path):
    change = ('title = "Digits that', 'store = ["rounds"]\nrecipe.checkpoint_every = 1\ntitle = "Digits that')
    rounds = ("rounds = 2", "rounds = 4")
    folder, out = table(tmp_path / "mini", change=change, rounds=rounds), tmp_path / "out"
    fn.reproduce(folder, settings=["shift"], only=["FedAvg"], out=out, device="cpu")
    assert kept_rounds(out / "runs/shift/fedavg/seed-0/checkpoints") == [0, 1, 2, 3, 4]
    again = fn.reproduce(folder, settings=["shift"], only=["FedAvg"], out=out, device="cpu")
    assert again.ran == 0
