"""MedMNIST, .npz files and Hugging Face datasets saved to disk."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.data.readers import medmnist as medmnist_reader
from fednorms.data.readers import npz as npz_reader
from fednorms.data.readers import recognized
from fednorms.data.registry import federation
from tests.support.layouts import gradient, sizes


def medmnist(path, shape=(28, 28), classes=3, labels=1):
    y = {
        part: np.arange(n)[:, None].repeat(labels, 1) % classes for part, n in (("train", 12), ("val", 6), ("test", 6))
    }
    np.savez(
        path,
        **{f"{part}_images": gradient(len(t), shape) for part, t in y.items()},
        **{f"{part}_labels": t for part, t in y.items()},
    )
    return path


def test_medmnist(tmp_path):
    path = medmnist(tmp_path / "organamnist.npz")
    fed = medmnist_reader.medmnist(path)
    assert sizes(fed) == {"organamnist": {"train": 12, "val": 6, "test": 6}}
    assert fed.shape == (1, 28, 28)
    assert torch.equal(fed.sites[0].train.x[:, 0], torch.from_numpy(gradient(12, (28, 28))))
    medmnist(tmp_path / "organcmnist.npz", (28, 28, 3))
    both = federation("medmnist", root=tmp_path, size=14)
    assert both.shape == (3, 14, 14)
    assert [s.name for s in both.sites] == ["organamnist", "organcmnist"]
    medmnist(tmp_path / "bloodmnist.npz", (28, 28, 3), classes=8)
    with pytest.raises(BadInput, match=r"different numbers of classes .*give the path of one"):
        medmnist_reader.medmnist(tmp_path)
    with pytest.raises(BadInput, match="14 labels per image"):
        medmnist_reader.medmnist(medmnist(tmp_path / "chestmnist.npz", labels=14))
    with pytest.raises(BadInput, match="volumes are not supported"):
        medmnist_reader.medmnist(medmnist(tmp_path / "organmnist3d.npz", (28, 28, 28)))
    with pytest.raises(BadInput, match=r"has no \.npz"):
        medmnist_reader.medmnist(tmp_path / "nothing")


def test_npz(tmp_path):
    x, y = gradient(20, (8, 8, 3)), np.arange(20) % 4
    np.savez(tmp_path / "a.npz", x=x, y=y, classes=np.array(["p", "q", "r", "s"]))
    np.savez(tmp_path / "b.npz", images_train=x[:10], labels_train=y[:10], images_test=x[10:], labels_test=y[10:])
    fed = federation("npz", root=tmp_path, val=0, test=0.2)
    assert fed.classes == ("p", "q", "r", "s")
    assert sizes(fed) == {"a": {"train": 16, "test": 4}, "b": {"train": 10, "test": 10}}
    assert torch.equal(fed.site("b").test.x, torch.from_numpy(x[10:]).permute(0, 3, 1, 2))
    assert federation("npz", root=tmp_path / "a.npz", size=4).shape == (3, 4, 4)
    assert [r.name for r, _ in recognized(tmp_path)] == ["npz"]


def test_archives_with_objects_or_without_images_are_refused(tmp_path):
    np.savez(tmp_path / "evil.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1, int))
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(BadInput) as caught:
        npz_reader.npz(tmp_path)
    for words in ("evil.npz cannot be read as plain arrays", "other.npz: no x and y", "text.npz cannot be read"):
        assert words in str(caught.value)
    assert recognized(tmp_path) == []


def test_hugging_face_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(BadInput, match=r'pip install "fednorms\[hf\]"'):
        federation("huggingface", root=tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the extra hf is not installed")
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_datasets_saved_to_disk(tmp_path):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from datasets import Image as ImageFeature
    from PIL import Image

    def made(n):
        images = [Image.fromarray(i) for i in gradient(n, (8, 8, 3))]
        columns = {"image": images, "label": [i % 2 for i in range(n)], "site": ["ab"[i // 2 % 2] for i in range(n)]}
        features = {"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "site": Value("string")}
        return Dataset.from_dict(columns, Features(features))

    made(20).save_to_disk(str(tmp_path / "one"))
    fed = federation("huggingface", root=tmp_path / "one", val=0, test=0.2)
    assert fed.classes == ("cat", "dog")
    assert sizes(fed) == {"a": {"train": 8, "test": 2}, "b": {"train": 8, "test": 2}}
    DatasetDict(train=made(20), test=made(4)).save_to_disk(str(tmp_path / "two"))
    two = federation("huggingface", root=tmp_path / "two", size=4)
    assert sizes(two) == {"a": {"train": 10, "test": 2}, "b": {"train": 10, "test": 2}}
    assert two.shape == (3, 4, 4)
    assert [r.name for r, _ in recognized(tmp_path / "two")] == ["huggingface"]
