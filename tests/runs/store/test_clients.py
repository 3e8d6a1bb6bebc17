"""The client store: a limit that is kept, states that come back bit for bit, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.runs.store.clients import ClientStore

SIZE = 16  # bytes of the tensors of `client`


def client(round: int, fill: float) -> ClientState:
    return ClientState(
        round,
        Tree(w=torch.full((2,), fill)),
        {"a": Tree(c=torch.full((1,), -fill)), "b": Tree()},
        Tree(v=torch.ones(1)),
    )


def is_client(state: ClientState | None, round: int, fill: float) -> bool:
    return (
        state is not None
        and state.round == round
        and state.local["w"].equal(torch.full((2,), fill))
        and state.parts["a"]["c"].equal(torch.full((1,), -fill))
        and list(state.parts) == ["a", "b"]
        and state.parts["b"] == Tree()
        and state.velocity["v"].equal(torch.ones(1))
    )


actions = st.lists(
    st.tuples(st.sampled_from(["put", "get", "clean"]), st.sampled_from(["a", "b/c", "ü", ""]), st.integers(0, 99)),
    max_size=30,
)


@given(actions, st.sampled_from([0, SIZE, 2 * SIZE, 10**6]))
def test_it_is_a_dictionary_whatever_the_limit(steps, limit):
    store, expected, changed = ClientStore(limit), {}, set()
    for what, name, number in steps:
        if what == "put":
            store.put(name, client(number, number / 7))
            expected[name] = number
            changed.add(name)
        elif what == "clean":
            store.mark_clean()
            changed.clear()
        elif name in expected:
            assert is_client(store.get(name), expected[name], expected[name] / 7)
        else:
            assert store.get(name) is None
            with pytest.raises(KeyError):
                store[name]
        assert store.in_memory() <= limit
        assert store.names() == list(store) == sorted(expected)
        assert list(store.changed) == sorted(changed)
        assert len(store) == len(expected)
        assert (name in store) == (name in expected)
    for name, state in store.changed.items():
        assert is_client(state, expected[name], expected[name] / 7)
    for name, state in store.items():
        assert is_client(state, expected[name], expected[name] / 7)
    store.close()


def test_below_the_limit_the_same_object_comes_back_and_no_file_is_written(tmp_path):
    store = ClientStore(2 * SIZE, tmp_path / "spill")
    first = client(1, 1.0)
    store.put("a", first)
    store.put("b", client(1, 2.0))
    assert store["a"] is first
    assert not (tmp_path / "spill").exists()


def test_the_least_recently_used_state_is_spilled(tmp_path):
    store = ClientStore(2 * SIZE, tmp_path)
    states = {name: client(1, float(i)) for i, name in enumerate("abc")}
    store.put("a", states["a"])
    store.put("b", states["b"])
    assert store["a"] is states["a"]
    store.put("c", states["c"])
    assert store["a"] is states["a"]
    assert store["c"] is states["c"]
    assert store["b"] is not states["b"]
    assert is_client(store["b"], 1, 1.0)


def test_a_state_that_was_only_read_is_not_written_again(tmp_path, monkeypatch):
    store = ClientStore(0, tmp_path)
    store.put("a", client(1, 1.0))
    store.put("b", client(1, 2.0))
    monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("written again"))
    for _ in range(3):
        assert is_client(store["a"], 1, 1.0)
        assert is_client(store["b"], 1, 2.0)


def test_files_of_old_states_do_not_pile_up(tmp_path):
    store = ClientStore(0, tmp_path)
    for number in range(10):
        store.put("a", client(number, 1.0))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert store["a"].round == 9


def test_states_without_tensors_never_reach_the_disk(tmp_path):
    store = ClientStore(0, tmp_path)
    for i in range(1000):
        store.put(f"site {i}", ClientState(i, Tree(), {"fedavg": Tree()}))
    store.put("big", client(1, 1.0))
    assert store.in_memory() == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert store["site 7"].round == 7
    assert store["site 7"].parts == {"fedavg": {}}


def test_odd_bits_and_types_come_back_from_the_disk(tmp_path):
    store = ClientStore(0, tmp_path)
    local = Tree(
        nan=torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
        count=torch.tensor(2**60 + 1),
        double=torch.tensor([0.1], dtype=torch.float64),
        flag=torch.tensor([True, False]),
        view=torch.arange(6.0).reshape(2, 3).t(),
    )
    store.put("a", ClientState(1, local, {}))
    back = store["a"].local
    assert back["nan"].view(torch.int32).item() == 0x7FC00001
    assert back["count"].item() == 2**60 + 1
    assert list(back) == list(local)
    for name in ("double", "flag", "view", "count"):
        assert back[name].equal(local[name])
        assert back[name].dtype == local[name].dtype


def test_changed_is_a_view_of_that_moment(tmp_path):
    store = ClientStore(0, tmp_path)
    store.put("b", client(1, 1.0))
    store.put("a", client(1, 2.0))
    changed = store.changed
    store.mark_clean()
    store.put("c", client(1, 3.0))
    assert list(changed) == ["a", "b"]
    assert is_client(changed["a"], 1, 2.0)
    assert changed.get("c") is None
    assert list(store.changed) == ["c"]


def test_a_source_is_read_when_asked_for_and_never_written(tmp_path):
    class Source(dict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            return super().__getitem__(name)

    source = Source({name: client(1, float(i)) for i, name in enumerate("abc")})
    store = ClientStore(SIZE, tmp_path, source)
    assert store.names() == ["a", "b", "c"]
    assert len(store) == 3
    assert list(store.changed) == []
    assert source.reads == 0
    for _ in range(2):
        for i, name in enumerate("abc"):
            assert is_client(store[name], 1, float(i))
    assert list(tmp_path.iterdir()) == []
    store.put("b", client(2, 5.0))
    store.put("d", client(2, 6.0))
    assert is_client(store["b"], 2, 5.0)
    assert store.names() == ["a", "b", "c", "d"]
    assert list(store.changed) == ["b", "d"]
    assert source["b"].round == 1


@pytest.mark.parametrize("how", ["close", "collect"])
def test_nothing_is_left_behind(tmp_path, how, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = ClientStore(0)
    store.put("a", client(1, 1.0))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    if how == "close":
        store.close()
        with pytest.raises(RunFailed, match="store was closed"):
            store["a"]
    else:
        del store
        gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_other_files_in_the_spill_folder_stay(tmp_path):
    (tmp_path / "mine").write_text("")
    store = ClientStore(0, tmp_path)
    store.put("a", client(1, 1.0))
    store.close()
    assert os.listdir(tmp_path) == ["mine"]


def test_a_full_disk_is_one_clear_error_and_the_state_stays(tmp_path, monkeypatch):
    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = ClientStore(SIZE, tmp_path)
    store.put("a", client(1, 1.0))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        with pytest.raises(RunFailed, match=f"Cannot write {tmp_path}: the disk is full"):
            store.put("b", client(1, 2.0))
    assert is_client(store["a"], 1, 1.0)
    assert is_client(store["b"], 1, 2.0)


def test_a_spilled_file_that_vanishes_is_one_clear_error(tmp_path):
    store = ClientStore(0, tmp_path)
    store.put("a", client(1, 1.0))
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(RunFailed, match='Cannot read the state of client "a"'):
        store["a"]


def test_a_negative_limit_is_bad_input():
    with pytest.raises(BadInput, match="at least 0 bytes, got -1"):
        ClientStore(-1)
