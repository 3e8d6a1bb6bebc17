"""Splits, sites and federations: what they hold, and bad ones are refused with all their problems."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.data import Federation, MappedImages, Preprocessing, Site, Split


def make(n=4, shape=(1, 4, 4), classes=2, dtype=torch.uint8):
    x = torch.arange(n * int(np.prod(shape))).remainder(251).view(n, *shape).to(dtype)
    return Split(x, torch.arange(n) % classes)


def federation(*sites, classes=("cat", "dog"), preprocessing=None):
    return Federation("f", sites, classes, preprocessing or Preprocessing())


def refused(*sites, classes=("cat", "dog"), preprocessing=None) -> str:
    with pytest.raises(BadInput) as caught:
        federation(*sites, classes=classes, preprocessing=preprocessing)
    return str(caught.value)


def test_split_batch_takes_lists_arrays_and_tensors_in_the_given_order():
    split = make(5)
    for indices in ([3, 0, 3], np.array([3, 0, 3]), torch.tensor([3, 0, 3])):
        x, y = split.batch(indices)
        assert torch.equal(x, torch.stack([split.x[3], split.x[0], split.x[3]]))
        assert y.tolist() == [1, 0, 1]


def test_split_batches_cover_everything_once():
    split = make(7)
    x, y = (torch.cat(parts) for parts in zip(*split.batches(3), strict=True))
    assert torch.equal(x, split.x)
    assert torch.equal(y, split.y)


def test_clients_and_unseen_do_not_depend_on_the_order_of_the_sites():
    sites = [Site("b", "d", make(), test=make()), Site("u", "e", test=make()), Site("a", "d", make())]
    there, back = federation(*sites), federation(*reversed(sites))
    assert [s.name for s in there.clients] == [s.name for s in back.clients] == ["a", "b"]
    assert [s.name for s in there.unseen] == [s.name for s in back.unseen] == ["u"]
    assert there.domains == ("d", "e")
    assert there.shape == (1, 4, 4)
    assert there.num_classes == 2
    assert there.site("u").unseen


def test_everything_is_immutable():
    fed = federation(Site("a", "a", make()))
    for thing, name in ((fed, "name"), (fed.sites[0], "train"), (fed.sites[0].train, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, None)


def test_fingerprint_is_of_the_content():
    a, b = Site("a", "a", make()), Site("b", "b", make())
    base = federation(a, b).fingerprint()
    assert federation(b, a).fingerprint() == base
    assert pickle.loads(pickle.dumps(federation(a, b))).fingerprint() == base
    pixel = make()
    pixel.x[3, 0, 3, 3] += 1
    others = [
        federation(a),
        federation(a, Site("c", "b", make())),
        federation(a, Site("b", "c", make())),
        federation(a, Site("b", "b", pixel)),
        federation(a, Site("b", "b", Split(make().x, make().y.flip(0)))),
        federation(a, Site("b", "b", test=make())),
        federation(a, b, classes=("cat", "cow")),
    ]
    assert len({base, *(fed.fingerprint() for fed in others)}) == 8


def test_fingerprint_of_floats_of_any_type():
    found = {federation(Site("a", "a", make(dtype=t))).fingerprint() for t in (torch.float32, torch.bfloat16)}
    assert len(found) == 2


def test_repr_and_dict_show_the_content():
    fed = federation(Site("north", "ct", make(6), make(2), attributes={"vendor": "x"}), Site("s", "mr", test=make(1)))
    table = [line.split() for line in repr(fed).splitlines()[1:]]
    assert table == [
        ["site", "domain", "train", "val", "test", "classes"],
        ["north", "ct", "6", "2", "-", "2/2"],
        ["s", "mr", "-", "-", "1", "1/2"],
    ]
    summary = json.loads(json.dumps(fed.to_dict()))
    assert summary["sites"][0]["images"] == {"train": [3, 3], "val": [1, 1]}
    assert summary["sites"][0]["attributes"] == {"vendor": "x"}
    assert summary["shape"] == [1, 4, 4]


def test_repr_of_many_sites_is_short():
    fed = federation(*(Site(f"s{i}", "d", make()) for i in range(100)))
    assert len(repr(fed).splitlines()) < 30
    assert "80 more sites" in repr(fed)


def test_without_and_hold_out_take_sites_and_domains():
    fed = federation(
        Site("a", "x", make(), make(), make(3)),
        Site("b", "y", make(5), make(2)),
        Site("c", "y", make(), test=make(1)),
    )
    assert [s.name for s in fed.without("y").sites] == ["a"]
    held = fed.hold_out("y")
    assert [s.name for s in held.clients] == ["a"]
    assert {s.name: {p: len(v) for p, v in s.splits.items()} for s in held.unseen} == {
        "b": {"test": 7},
        "c": {"test": 1},
    }
    assert [s.name for s in fed.hold_out("a").unseen] == ["a"]
    assert [s.name for s in fed.clients] == ["a", "b", "c"], "the original is unchanged"
    with pytest.raises(BadInput, match="no site has training data"):
        fed.hold_out("x", "y")
    with pytest.raises(BadInput, match=r'no site or domain "z".*it has "a", "b", "c"'):
        fed.hold_out("z")
    with pytest.raises(BadInput, match='did you mean "north"'):
        federation(Site("north", "north", make())).site("nort")


def test_pooled_holds_all_training_data_once_and_tests_per_site():
    a, b = make(4), make(6)
    fed = federation(Site("a", "a", a, make(2), make(3)), Site("b", "b", b), Site("u", "u", test=make(2)))
    pool = fed.pooled("all")
    (client,) = pool.clients
    assert torch.equal(client.train.x, torch.cat([a.x, b.x]))
    assert torch.equal(client.train.y, torch.cat([a.y, b.y]))
    assert len(client.val) == 2
    assert client.test is None
    assert {s.name: list(s.splits) for s in pool.unseen} == {"a": ["test"], "u": ["test"]}


def test_an_empty_split_is_ignored():
    empty = Split(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64))
    assert Site("a", "a", make(), empty, empty).splits.keys() == {"train"}


def test_refuses_a_site_without_data():
    assert 'site "b" has no data' in refused(Site("a", "a", make()), Site("b", "b"))


def test_refuses_no_sites_no_training_site_and_no_classes():
    assert "no sites" in refused()
    assert "no site has training data" in refused(Site("a", "a", test=make()))
    assert "list of classes is empty" in refused(Site("a", "a", make()), classes=())
    assert 'class names given twice: "cat"' in refused(Site("a", "a", make()), classes=("cat", "cat"))


def test_refuses_two_sites_with_the_same_name():
    assert '2 sites are named "a"' in refused(Site("a", "a", make()), Site("a", "b", make()))


@pytest.mark.parametrize("label", [-1, 2, 99])
def test_refuses_labels_outside_the_range(label):
    y = torch.tensor([0, 1, label, 0])
    message = refused(Site("a", "a", make()), Site("b", "b", make(), test=Split(make().x, y)))
    assert 'site "b", test: labels must be 0 to 1 for 2 classes' in message
    assert f"got {label} at position 2" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_images_that_are_not_finite(value):
    x = torch.zeros(600, 1, 2, 2)
    x[517, 0, 1, 0] = x[599, 0, 0, 0] = value
    message = refused(Site("a", "a", Split(x, torch.zeros(600, dtype=torch.int64))))
    assert 'site "a", train: 2 images have values that are not finite' in message
    assert "first at position 517" in message


def test_refuses_different_shapes_naming_sites_and_shapes():
    message = refused(Site("a", "a", make()), Site("b", "b", make(shape=(3, 4, 4))), Site("c", "c", make()))
    assert '1x4x4 at "a", "c"' in message
    assert '3x4x4 at "b"' in message


def test_refuses_lengths_that_differ():
    message = refused(Site("a", "a", Split(torch.zeros(3, 1, 4, 4), torch.tensor([0, 1]))))
    assert "3 images but 2 labels" in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_refuses_images_of_other_types(dtype):
    assert f"got {dtype}" in refused(Site("a", "a", Split(make().x.to(dtype), make().y)))


def test_refuses_labels_of_other_types_and_shapes():
    assert "labels must be int64" in refused(Site("a", "a", Split(make().x, make().y.int())))
    assert "labels must be int64" in refused(Site("a", "a", Split(make().x, make().y[:, None])))
    assert "torch tensors" in refused(Site("a", "a", Split(make().x.numpy(), make().y.numpy())))


def test_refuses_images_without_channels_and_mixed_types_and_wrong_preprocessing():
    assert "four axes" in refused(Site("a", "a", Split(make().x[:, 0], make().y)))
    assert "different types" in refused(Site("a", "a", make()), Site("b", "b", make(dtype=torch.float32)))
    assert "preprocessing has 3 channels" in refused(Site("a", "a", make()), preprocessing=Preprocessing.centered(3))


def test_reports_all_problems_at_once():
    message = refused(
        Site("a", "a", Split(make().x, make().y + 1)),
        Site("a", "a", make(shape=(1, 5, 5))),
        Site("b", "b"),
        Site("c", "c", Split(make().x, make().y[:2])),
    )
    for word in ("problems", '2 sites are named "a"', "labels must be", "no data"):
        assert word in message
    assert "different shapes" in message
    assert "4 images but 2 labels" in message


def test_mapped_images_behave_like_the_tensor(tmp_path):
    x = torch.arange(5 * 3 * 2 * 2, dtype=torch.uint8).view(5, 3, 2, 2)
    np.save(tmp_path / "x.npy", x.numpy())
    y = torch.tensor([0, 1, 0, 1, 0])
    lazy, plain = Split(MappedImages(tmp_path / "x.npy"), y), Split(x, y)
    assert lazy.shape == plain.shape
    assert len(lazy) == len(plain)
    for indices in ([4, 1, 1, 0], torch.tensor([2]), np.array([], dtype=np.int64)):
        assert torch.equal(lazy.batch(indices)[0], plain.batch(indices)[0])
        assert torch.equal(lazy.subset(indices).x[:], plain.subset(indices).x)
    batch, _ = lazy.batch([0])
    batch.zero_()
    assert torch.equal(lazy.x[:1], x[:1]), "a batch is a copy"
    again = pickle.loads(pickle.dumps(lazy.subset([3, 2])))
    assert torch.equal(again.x[:], x[[3, 2]])
    fed_lazy, fed_plain = federation(Site("a", "a", lazy, lazy)), federation(Site("a", "a", plain, plain))
    assert fed_lazy.fingerprint() == fed_plain.fingerprint()
    pool = federation(Site("a", "a", lazy.subset([0, 1])), Site("b", "b", lazy.subset([4]))).pooled()
    assert isinstance(pool.clients[0].train.x, MappedImages)
    assert torch.equal(pool.clients[0].train.x[:], x[[0, 1, 4]])


def test_preprocessing_against_the_formula():
    x = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    y = Preprocessing(mean, std)(x, torch.float64)
    for c in range(3):
        expected = (x[:, c].double() / 255 - mean[c]) / std[c]
        torch.testing.assert_close(y[:, c], expected, rtol=0, atol=1e-12)
    assert y.dtype == torch.float64
    assert torch.equal(Preprocessing(mean, std)(x[None], torch.float64)[0], y), "one more leading axis"
    assert x.dtype == torch.uint8


def test_preprocessing_does_not_change_floats_and_inputs():
    x = torch.randn(2, 1, 3, 3)
    before = x.clone()
    assert torch.equal(Preprocessing()(x), x)
    Preprocessing.centered(1)(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(Preprocessing((0.5,), (0.5,))(x), Preprocessing((0.5,) * 1, (0.5,) * 1)(x))


def test_preprocessing_can_be_differentiated_after_inference_mode():
    scale = Preprocessing((0.1, 0.2), (1.0, 2.0))
    with torch.inference_mode():
        scale(torch.zeros(1, 2, 1, 1))
    x = torch.zeros(1, 2, 1, 1, requires_grad=True)
    scale(x).sum().backward()
    assert x.grad.flatten().tolist() == [1.0, 0.5]


def test_preprocessing_round_trips_and_refuses_nonsense():
    for scale in (Preprocessing(), Preprocessing.centered(3), Preprocessing((0.1, 0.2), (1, 2))):
        assert Preprocessing.from_dict(json.loads(json.dumps(scale.to_dict()))) == scale
    for mean, std in [
        ((0.5,), None),
        ((0.5,), (0.0,)),
        ((0.5,), (1.0, 1.0)),
        ((), ()),
        ((float("nan"),), (1.0,)),
    ]:
        with pytest.raises(BadInput, match="Preprocessing"):
            Preprocessing(mean, std)
    with pytest.raises(BadInput, match="numbers"):
        Preprocessing(("a",), (1.0,))
    with pytest.raises(BadInput, match="unknown"):
        Preprocessing.from_dict({"men": [0.5]})
    with pytest.raises(BadInput, match="uint8"):
        Preprocessing()(torch.zeros(1, 1, 1, 1, dtype=torch.int64))
