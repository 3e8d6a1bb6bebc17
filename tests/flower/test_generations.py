"""A site's state on its disk: a flipped bit is found before it reaches the model."""

from __future__ import annotations

import pytest
import torch

from fednorms.core.errors import RunFailed
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.runs.store.packing import pack_client

generations = pytest.importorskip("fednorms.flower.generations")


@pytest.fixture
def kept(tmp_path):
    kept = generations.Generations(tmp_path, "recipe", "north")
    kept.save(ClientState(1, Tree(w=torch.arange(50.0)), {"part": Tree(v=torch.ones(3))}), accepted=0)
    kept.save_fixed(Tree(w=torch.ones(3)))
    return kept


@pytest.mark.parametrize("name", ["round-000001.safetensors", "fixed.safetensors"])
def test_flipped_bits_are_found(kept, name):
    path = kept.folder / name
    data, said = path.read_bytes(), []
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            kept.load(1) if name.startswith("round") else kept.load_fixed()
        except RunFailed as error:
            said.append(str(path) in str(error))
        else:
            assert b'"hash"' not in path.read_bytes() or data[at : at + 1] == b" "
    assert len(said) > 20
    assert all(said)
    path.write_bytes(data)
    assert torch.equal(kept.load(1).local["w"], torch.arange(50.0))
    assert torch.equal(kept.load_fixed()["w"], torch.ones(3))


def test_a_state_of_version_0_1_has_no_hash_and_is_read(kept):
    (kept.folder / "round-000001.safetensors").write_bytes(pack_client(ClientState(1, Tree(w=torch.ones(2)), {})))
    assert torch.equal(kept.load(1).local["w"], torch.ones(2))
