"""Images on disk: the next batch is read while this one trains, in order, with the same bits and clear errors."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.round import broadcast, initial_state, local_update
from fednorms.core.states import Client
from fednorms.data import MappedImages, Split
from fednorms.data.pack import pack
from fednorms.data.packed import unpacked
from fednorms.data.read_ahead import read_ahead
from tests.data.test_protocols import tiny
from tests.support.tiny import TinyNet, same, tiny_task
from tests.support.waiting import HANG


class Slow(MappedImages):
    """Images that report when they are read, like a slow decoder."""

    def __init__(self, path, rows=None, broken=()):
        super().__init__(path, rows)
        self.broken, self.log = set(broken), []
        self.started = [threading.Event() for _ in range(9)]
        self.threads = set()

    slow = True

    def __getitem__(self, indices):
        number = sum(entry[0] == "read" for entry in self.log)
        self.log.append(("read", number))
        self.threads.add(threading.get_ident())
        self.started[number].set()
        if number in self.broken:
            raise BadInput(f"image {number} is damaged")
        return super().__getitem__(indices)


@pytest.fixture
def slow(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.integers(0, 256, (12, 3, 8, 8), dtype=np.uint8))
    return tmp_path / "x.npy"


def labelled(x):
    return Split(x, torch.arange(len(x)) % 3)


def setting(data, loss=None):
    torch.manual_seed(0)
    task = tiny_task("fedavg", {"a": data}, model=TinyNet(), batch_size=4)
    task = task if loss is None else replace(task, loss=loss(task.loss))
    return task, broadcast(task, initial_state(task)), Client("clinic", data)


def test_the_next_batch_is_read_while_this_one_trains(slow):
    images = Slow(slow)

    def watched(base):
        def loss(logits, y):
            step = sum(entry[0] == "step" for entry in images.log)
            images.log.append(("step", step))
            if step < 2:
                assert images.started[step + 1].wait(HANG), "the next batch is not being read"
            assert not images.started[step + 2].is_set(), "and no more than the next"
            return base(logits, y)

        return loss

    task, sent, client = setting(labelled(images), watched)
    local_update(task, sent, client)
    steps = [entry for entry in images.log if entry[0] == "step"]
    assert len(steps) == 3
    assert images.log.index(("read", 2)) > images.log.index(("step", 0)), "the third waits until the second is used"
    assert threading.get_ident() not in images.threads


def test_results_are_those_of_images_in_memory(slow):
    lazy = labelled(Slow(slow))
    task, sent, client = setting(lazy)
    upload, _ = local_update(task, sent, client)
    eager, _ = local_update(task, sent, replace(client, data=labelled(Slow(slow)[:])))
    assert same(upload.model, eager.model)
    plan = [[3, 1], [0], [2, 2, 5]]
    for (x, y), rows in zip(lazy.stream(plan), plan, strict=True):
        assert torch.equal(x, lazy.x[rows])
        assert y.tolist() == [row % 3 for row in rows]


def test_a_damaged_image_names_the_client_in_its_turn(slow):
    images = Slow(slow, broken=[1])
    task, sent, client = setting(labelled(images))
    with pytest.raises(BadInput, match='Client "clinic": image 1 is damaged'):
        local_update(task, sent, client)
    got = []
    with pytest.raises(BadInput, match="image 1 is damaged"):
        got.extend(labelled(Slow(slow, broken=[1])).stream([[0], [1], [2]]))
    assert len(got) == 1, "what came before it was given out"


def test_no_thread_is_left_behind():
    before = set(threading.enumerate())
    stream = read_ahead(lambda n: n, range(100))
    assert [next(stream), next(stream)] == [0, 1]
    stream.close()
    assert set(threading.enumerate()) == before


def test_small_raw_images_are_read_without_a_thread(tmp_path):
    fed = tiny()
    raw, jpeg = (unpacked(pack(fed, tmp_path / f"{q}.fnpack", quality=q)) for q in (None, 90))
    assert not raw.sites[0].train.x.slow, "192 bytes are copied faster than a thread starts"
    assert jpeg.sites[0].train.x.slow
    large = unpacked(pack(tiny(size=40), tmp_path / "large.fnpack"))
    assert large.sites[0].train.x.slow
    assert [y.tolist() for _, y in raw.sites[0].train.batches(3)] == [
        y.tolist() for _, y in fed.sites[0].train.batches(3)
    ]


def test_a_pack_opens_only_its_own_format(tmp_path):
    """A jpeg pack whose bytes are another image format is damaged, not decoded by whatever decoder fits."""
    path = pack(tiny(), tmp_path / "a.fnpack", quality=90)
    store = unpacked(path).sites[0].train.x._store
    store.codec = "webp"
    with pytest.raises(BadInput, match="image 0 is damaged"):
        store.images(np.array([0]))
