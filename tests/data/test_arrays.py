"""Federations from arrays and datasets: layouts, types, splits, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fednorms.core.errors import BadInput
from fednorms.core.passes import prepare_test
from fednorms.core.round import broadcast, initial_state
from fednorms.core.states import Client, context_of
from fednorms.data import Preprocessing, from_arrays, from_datasets
from tests.support.tiny import tiny_task


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def whole(x, **options):
    """The images as the federation stores them."""
    y = np.zeros(len(x), dtype=np.int64)
    return from_arrays({"a": {"train": (x, y)}}, **options).sites[0].train.x


def test_layouts_are_distinguished():
    x = numbers(5, 6, 7)
    assert torch.equal(whole(x), torch.from_numpy(x)[:, None])
    x = numbers(5, 6, 7, 3)
    assert torch.equal(whole(x), torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    x = numbers(5, 3, 6, 7)
    assert torch.equal(whole(x), torch.from_numpy(x))
    assert torch.equal(whole(torch.from_numpy(x)), torch.from_numpy(x))


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (5, 1, 8, 4), (5, 2, 8, 8), (5, 8)])
def test_an_ambiguous_layout_must_be_given(shape):
    with pytest.raises(BadInput, match=r'site "a", train: .*layout='):
        whole(numbers(*shape))
    if len(shape) == 4:
        assert tuple(whole(numbers(*shape), layout="NCHW").shape) == shape
        n, h, w, c = shape
        assert tuple(whole(numbers(*shape), layout="NHWC").shape) == (n, c, h, w)


def test_refuses_a_wrong_or_unknown_layout_and_channels():
    with pytest.raises(BadInput, match="layout NHW has 3 axes"):
        whole(numbers(5, 3, 8, 8), layout="NHW")
    with pytest.raises(BadInput, match="layout must be"):
        whole(numbers(5, 8, 8), layout="HWN")
    with pytest.raises(BadInput, match="channels must be"):
        whole(numbers(5, 8, 8), channels=2)
    with pytest.raises(BadInput, match="cannot make 3 channels of 2"):
        whole(numbers(5, 2, 8, 8), layout="NCHW", channels=3)


def test_channels_are_repeated_dropped_or_made_gray_as_pillow_does():
    grey = numbers(4, 6, 6)
    assert torch.equal(whole(grey, channels=3), torch.from_numpy(np.stack([grey] * 3, 1)))
    colour = numbers(4, 6, 6, 4)
    assert torch.equal(whole(colour, channels=3), torch.from_numpy(colour[..., :3].transpose(0, 3, 1, 2).copy()))
    pillow = np.stack([np.asarray(Image.fromarray(image[..., :3]).convert("L")) for image in colour])
    ours = whole(colour, channels=1)[:, 0].numpy()
    assert abs(ours.astype(int) - pillow.astype(int)).max() <= 1
    assert whole(colour / np.float32(255), channels=1).dtype == torch.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4"])
def test_floats_become_float32(dtype):
    x = (numbers(3, 4, 4) / 256).astype(dtype)
    stored = whole(x)
    assert stored.dtype == torch.float32
    np.testing.assert_array_equal(stored[:, 0].numpy(), x.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float64, ">f8", np.longdouble])
def test_float64_is_not_rounded(dtype):
    x = np.random.default_rng(0).random((3, 4, 4)).astype(dtype)
    stored = whole(x)
    assert stored.dtype == torch.float64
    np.testing.assert_array_equal(stored[:, 0].numpy(), x.astype(np.float64))
    assert torch.equal(whole(torch.from_numpy(x.astype(np.float64))), stored)


def test_float64_images_become_gray_in_float64():
    x = np.random.default_rng(0).random((3, 8, 8, 3))
    gray = whole(x, channels=1)[:, 0].numpy()
    np.testing.assert_allclose(gray, x @ np.array([0.299, 0.587, 0.114]), rtol=1e-14)


def test_one_site_in_float64_makes_all_sites_float64():
    wide, y = np.random.default_rng(0).random((5, 4, 4)), np.arange(5) % 2
    made = from_arrays({"a": (wide, y), "b": (wide.astype(np.float32), y)})
    stored = [split.x for site in made.sites for split in site.splits.values()]
    assert {x.dtype for x in stored} == {torch.float64}
    assert set(made.site("b").train.x.flatten().tolist()) <= set(wide.astype(np.float32).flatten().tolist())


def test_a_step_in_float64_sees_float64_images_normalized_in_float64():
    x, y = np.random.default_rng(0).random((6, 3, 8, 8)), np.arange(6) % 3
    for preprocessing in (None, Preprocessing((0.1, 0.2, 0.3), (0.7, 0.8, 0.9))):
        made = from_arrays({"a": {"train": (x, y)}}, preprocessing=preprocessing)
        data = {"a": made.sites[0].train}
        task = tiny_task("fedavg", data, preprocessing=made.preprocessing)
        seen, _ = prepare_test(task, data["a"].batch(range(6)), *_of_a_test(task, data["a"]))
        mean, std = (np.array(v).reshape(-1, 1, 1) for v in (made.preprocessing.mean, made.preprocessing.std))
        assert seen.dtype == torch.float64
        np.testing.assert_allclose(seen.numpy(), (x - mean) / std, rtol=1e-13)


def _of_a_test(task, split):
    sent = broadcast(task, initial_state(task))
    return context_of(task, 0, Client("a", split), evaluating=True), {}, sent


def test_other_whole_numbers_become_uint8_if_they_fit():
    x = numbers(3, 4, 4)
    for other in (x.astype(np.int64), x.astype(">i2"), torch.from_numpy(x).int()):
        assert torch.equal(whole(other), whole(x))
    assert whole(x > 100).max() == 255
    assert whole(torch.from_numpy(x > 100)).max() == 255
    with pytest.raises(BadInput, match="0 to 255, got -1 to"):
        whole(x.astype(np.int32) - (x.min() + 1))
    with pytest.raises(BadInput, match="numbers"):
        whole(np.full((3, 4, 4), "x"))
    with pytest.raises(BadInput, match="real"):
        whole(torch.zeros(3, 4, 4, dtype=torch.complex64))


def test_arrays_that_torch_cannot_hold_are_copied():
    x = numbers(3, 4, 4)
    x.flags.writeable = False
    assert torch.equal(whole(x), torch.from_numpy(x.copy())[:, None])
    assert torch.equal(whole(x[::-1]), torch.from_numpy(x[::-1].copy())[:, None])


def test_nothing_is_copied_unnecessarily():
    x, t = numbers(4, 3, 8, 8), torch.zeros(4, 3, 8, 8)
    assert np.shares_memory(whole(x).numpy(), x)
    assert whole(t).data_ptr() == t.data_ptr()
    wide = x / 255
    assert np.shares_memory(whole(wide).numpy(), wide)


def test_a_pair_is_divided_and_given_splits_are_kept():
    x, y = numbers(40, 8, 8), np.arange(40) % 2
    fed = from_arrays(
        {"a": (x, y), "b": {"train": (x[:4], y[:4]), "val": (x[4:6], y[4:6])}, "u": {"test": (x, y)}},
        val=0.1,
        test=0.2,
    )
    a, b, u = fed.sites
    assert [len(s) for s in a.splits.values()] == [28, 4, 8]
    assert {image.numpy().tobytes() for s in a.splits.values() for image in s.x} == {image.tobytes() for image in x}
    for part in a.splits.values():
        rows = {image.tobytes(): int(label) for image, label in zip(x, y, strict=True)}
        assert [rows[image.numpy().tobytes()] for image in part.x] == part.y.tolist()
    assert {p: len(s) for p, s in b.splits.items()} == {"train": 4, "val": 2}
    assert u.unseen
    assert fed.classes == ("0", "1")


def test_the_same_call_gives_the_same_federation_and_other_seeds_do_not():
    sites = {"a": (numbers(30, 8, 8), np.arange(30) % 3)}
    assert from_arrays(sites).fingerprint() == from_arrays(sites).fingerprint()
    assert from_arrays(sites).fingerprint() != from_arrays(sites, seed=1).fingerprint()


def test_the_division_of_a_site_does_not_depend_on_other_sites():
    x, y = numbers(30, 8, 8), np.arange(30) % 3
    alone, together = from_arrays({"a": (x, y)}), from_arrays({"z": (x, y), "a": (x, y)})
    assert torch.equal(alone.site("a").train.x, together.site("a").train.x)


def test_groups_domains_and_attributes():
    x, y = numbers(20, 8, 8), np.arange(20) % 2
    patients = np.arange(20) // 4
    marked = x.copy()
    marked[:, 0, 0] = patients
    fed = from_arrays(
        {"a": (marked, y)},
        test=0.4,
        groups={"a": patients},
        domains={"a": "ct"},
        attributes={"a": {"v": "1"}},
    )
    site = fed.site("a")
    assert not set(site.train.x[:, 0, 0, 0].tolist()) & set(site.test.x[:, 0, 0, 0].tolist())
    assert (site.domain, site.attributes) == ("ct", {"v": "1"})
    with pytest.raises(BadInput, match='"b", which is not a site'):
        from_arrays({"a": (x, y)}, domains={"b": "ct"})
    with pytest.raises(BadInput, match="its own splits"):
        from_arrays({"a": {"train": (x, y)}}, groups={"a": patients})


def test_default_preprocessing_brings_pixels_to_plus_minus_one():
    y = np.arange(4)
    assert from_arrays({"a": (numbers(4, 8, 8, 3), y)}).preprocessing == Preprocessing.centered(3)
    assert from_arrays({"a": (torch.rand(4, 1, 8, 8), y)}).preprocessing == Preprocessing.centered(1)
    assert from_arrays({"a": (torch.randn(4, 1, 8, 8), y)}).preprocessing == Preprocessing(), "normalised already"
    own = Preprocessing((0.1,), (0.2,))
    assert from_arrays({"a": (torch.rand(4, 1, 8, 8) * 255, y)}, preprocessing=own).preprocessing == own
    with pytest.raises(BadInput, match=r"looks like 0 to 255"):
        from_arrays({"a": (torch.rand(4, 1, 8, 8) * 255, y)})


def test_refuses_all_that_is_wrong_at_once():
    x, y = numbers(6, 8, 8), np.arange(6) % 2
    with pytest.raises(BadInput) as caught:
        from_arrays(
            {
                "short": (x, y[:3]),
                "float": (x, y.astype(float)),
                "named": {"training": (x, y)},
                "single": x,
                "number": (3, y),
                "good": (x, y),
            }
        )
    message = str(caught.value)
    assert "5 problems" in message
    assert 'site "short": 6 images but 3 labels' in message
    assert 'site "float": labels must be whole numbers' in message
    assert 'site "named": splits are named train, val and test, got training' in message
    assert 'site "single": data must be a pair' in message
    assert 'site "number": expected an array' in message


def test_refuses_labels_beyond_the_classes_and_values_that_are_not_finite():
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6)
    with pytest.raises(BadInput, match="labels must be 0 to 2"):
        from_arrays({"a": (x, y)}, classes=["a", "b", "c"])
    x[5, 0, 0, 0] = float("nan")
    with pytest.raises(BadInput, match="not finite"):
        from_arrays({"a": (x, y)})


class Pictures(Dataset):
    """Items of any kind, from a list of images."""

    def __init__(self, images, labels, classes=None):
        self.images, self.labels = images, labels
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def test_datasets_of_tensors_arrays_and_pictures_agree():
    x, y = numbers(8, 9, 9, 3), [i % 2 for i in range(8)]
    kinds = {
        "tensor": Pictures([torch.from_numpy(i.transpose(2, 0, 1).copy()) for i in x], torch.tensor(y)),
        "array": Pictures(list(x), np.array(y)),
        "pillow": Pictures([Image.fromarray(i) for i in x], y),
        "list": [(i, label) for i, label in zip(x, y, strict=True)],
    }
    expected = from_arrays({"a": (x, np.array(y))}).fingerprint()
    for kind in kinds.values():
        assert from_datasets({"a": kind}).fingerprint() == expected


def test_datasets_in_gray_and_as_splits():
    x = numbers(6, 9, 9)
    grey = Pictures([Image.fromarray(i) for i in x], [0, 1] * 3, ["no", "yes"])
    palette = Pictures([Image.fromarray(i).convert("P") for i in x], [0, 1] * 3, ["no", "yes"])
    fed = from_datasets({"two": (grey, grey), "three": (grey, grey, grey), "named": {"test": grey}})
    assert {s.name: list(s.splits) for s in fed.sites} == {
        "two": ["train", "test"],
        "three": ["train", "val", "test"],
        "named": ["test"],
    }
    assert fed.classes == ("no", "yes")
    assert fed.shape == (1, 9, 9)
    assert from_datasets({"a": palette}).shape == (3, 9, 9)
    assert from_datasets({"a": TensorDataset(torch.rand(4, 7, 7), torch.arange(4))}).shape == (1, 7, 7)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Endless(), 'site "a": expected a dataset with __len__'),
        (
            Pictures([np.zeros((4, 4)), np.zeros((5, 4))], [0, 1]),
            r"item 1 is .* of shape \(1, 5, 4\), but item 0",
        ),
        (Pictures([np.zeros((4, 4))], [0.5]), "item 0: the label must be a whole number"),
        (Pictures([np.zeros(4)], [0]), "item 0: images have two or three axes"),
        ([np.zeros((4, 4))], "item 0 is not a pair"),
    ],
)
def test_refuses_datasets_that_are_not_images_and_labels(dataset, message):
    with pytest.raises(BadInput, match=message):
        from_datasets({"a": {"train": dataset}} if isinstance(dataset, list) else {"a": dataset})


def test_refuses_a_wrong_number_of_datasets():
    with pytest.raises(BadInput, match="got 1 datasets"):
        from_datasets({"a": (TensorDataset(torch.rand(4, 7, 7), torch.arange(4)),)})
