"""CIFAR-10, CIFAR-100 and CIFAR-10-C in tiny copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.data.mapped import MappedImages
from fednorms.data.readers import cifar, recognized
from fednorms.data.registry import federation
from tests.support.layouts import gradient, pickled, sizes


def rows(count, seed):
    return gradient(count, (3072,), seed), [i % 10 for i in range(count)]


@pytest.fixture
def batches(tmp_path):
    root = tmp_path / "cifar-10-batches-py"
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        data, labels = rows(10, i)
        pickled(root / name, {"data": data, "labels": labels, "batch_label": "x", "filenames": ["a.png"] * 10}, 2)
    return root


def test_python_batches(batches, tmp_path):
    with pytest.raises(BadInput, match=r"data_batch_1 is a pickled archive"):
        cifar.cifar_10(tmp_path, complete=False)
    fed = cifar.cifar_10(tmp_path, complete=False, allow_pickle=True)
    assert sizes(fed) == {"cifar-10": {"train": 50, "test": 10}}
    # A row is 1,024 red, 1,024 green, 1,024 blue values, row by row.
    expected = torch.from_numpy(rows(10, 1)[0].reshape(-1, 3, 32, 32))
    assert torch.equal(fed.sites[0].train.x[10:20], expected)
    assert fed.sites[0].test.y.tolist() == list(range(10))
    assert fed.classes[3] == "cat"
    chains = {p: cifar.cifar_10(batches, p, 8, False, True).protocol.augment for p in cifar.CIFAR10_PROTOCOLS}
    assert chains == {
        "fedntd": "crop_flip_cutout",
        "feddc": "feddyn",
        "fedbabu": "crop_flip",
        "greg": "flip_rotate",
    }
    half = cifar.cifar_10(batches, "greg", complete=False, allow_pickle=True)
    assert half.shape == (3, 224, 224)
    assert half.preprocessing.mean is None
    assert sizes(half) == {"cifar-10": {"train": 25, "test": 10}}, "half of the training images, all test images"
    with pytest.raises(BadInput, match=r"49,950 of 50,000 images of train missing"):
        cifar.cifar_10(batches, allow_pickle=True)
    (batches / "test_batch").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="test: test_batch is not a pickle of NumPy arrays"):
        cifar.cifar_10(batches, allow_pickle=True, complete=False)


def test_binary_and_png_give_the_same(batches, tmp_path):
    pickles = cifar.cifar_10(batches, complete=False, allow_pickle=True)
    binary = tmp_path / "bin"
    binary.mkdir()
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        data, labels = rows(10, i)
        table = np.concatenate([np.array(labels, np.uint8)[:, None], data], axis=1)
        (binary / f"{name}.bin").write_bytes(table.tobytes())
    assert cifar.cifar_10(binary, complete=False).fingerprint() == pickles.fingerprint()
    for part, split in pickles.sites[0].splits.items():
        for i, (x, y) in enumerate(zip(split.x, split.y.tolist(), strict=True)):
            folder = tmp_path / "png" / part / cifar.CIFAR10_CLASSES[y]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x.permute(1, 2, 0).numpy()).save(folder / f"{i:03d}.png")
    png = federation("cifar-10", root=tmp_path / "png", complete=False)
    assert png.classes == pickles.classes
    for part, split in pickles.sites[0].splits.items():
        other = png.sites[0].splits[part]
        order = torch.argsort(split.y, stable=True)
        assert torch.equal(other.x, split.x[order])
        assert torch.equal(other.y, split.y[order])
    (binary / "test_batch.bin").write_bytes(b"x" * 100)
    with pytest.raises(BadInput, match="truncated"):
        cifar.cifar_10(binary, complete=False)


def test_cifar_100(tmp_path):
    root = tmp_path / "cifar-100-python"
    for part, n in (("train", 200), ("test", 100)):
        labels = [i % 100 for i in range(n)]
        pickled(root / part, {"data": gradient(n, (3072,)), "fine_labels": labels, "coarse_labels": labels}, 2)
    pickled(root / "meta", {"fine_label_names": [f"name{i}" for i in range(100)]}, 2)
    fed = cifar.cifar_100(tmp_path, complete=False, allow_pickle=True)
    assert fed.protocol.augment == "feddyn_cifar100"
    assert fed.num_classes == 100
    assert fed.classes[7] == "name7"
    assert sizes(fed) == {"cifar-100": {"train": 200, "test": 100}}
    assert [r.name for r, _ in recognized(root)] == ["cifar-100"]
    assert cifar.cifar_100(root, protocol="fedbabu", complete=False, allow_pickle=True).preprocessing.mean[0] == 0.507


def test_corruptions_share_their_test_pictures(tmp_path):
    level = 40
    y = np.tile(np.arange(level) % 10, 5)
    np.save(tmp_path / "labels.npy", y)
    for i, name in enumerate(cifar.CORRUPTIONS):
        x = np.zeros((5 * level, 32, 32, 3), np.uint8)
        x[:, 0, 0, 0] = np.tile(np.arange(level), 5)  # the picture
        x[:, 0, 0, 1] = np.repeat(np.arange(5), level)  # the severity
        x[:, 0, 0, 2] = i
        np.save(tmp_path / f"{name}.npy", x)
    fed = federation("cifar-10-c", root=tmp_path, complete=False)
    assert fed.protocol.augment == "feddyn"
    assert fed.preprocessing.mean == (0.491, 0.482, 0.447)
    assert len(fed.clients) == 19
    assert all(parts == {"train": 38, "test": 2} for parts in sizes(fed).values())
    held = {tuple(s.test.x[:, 0, 0, 0].tolist()) for s in fed.sites}
    assert len(held) == 1, "the same pictures everywhere"
    for i, site in enumerate(fed.sites):
        assert not set(site.train.x[:, 0, 0, 0].tolist()) & set(held.copy().pop())
        assert (site.train.x[:, 1, 0, 0] == 3).all(), "severity 4"
        assert (site.train.x[:, 2, 0, 0] == i).all()
        assert site.train.y.tolist() == [v % 10 for v in site.train.x[:, 0, 0, 0].tolist()]
    assert (cifar.cifar_10_c(tmp_path, "severity-2", complete=False).sites[0].train.x[:, 1, 0, 0] == 1).all()
    (tmp_path / "frost.npy").unlink()
    with pytest.raises(BadInput, match=r"(?s)frost.npy is missing.*49,800 of 50,000 rows of labels missing"):
        cifar.cifar_10_c(tmp_path)
    assert len(cifar.cifar_10_c(tmp_path, complete=False).clients) == 18


def test_enlarged_images_beyond_the_memory_limit_stay_on_disk(batches, tmp_path):
    options = {"protocol": "greg", "size": 40, "complete": False, "allow_pickle": True}
    whole = cifar.cifar_10(batches, **options)
    mapped = cifar.cifar_10(batches, **options, cache=tmp_path / "cache", memory_limit=1000)
    assert isinstance(whole.sites[0].train.x, torch.Tensor)
    assert isinstance(mapped.sites[0].train.x, MappedImages)
    assert isinstance(mapped.sites[0].test.x, MappedImages)
    assert mapped.fingerprint() == whole.fingerprint()
    with pytest.raises(BadInput, match="needs a cache"):
        cifar.cifar_10(batches, **options, cache=False, memory_limit=1000)
