"""Digits-Five in its four layouts, and the papers' protocols on the real sheets if available."""

from __future__ import annotations

import bz2
import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.data.pickles import to_npz
from fednorms.data.readers.digits_five import PROTOCOLS, digits_five
from fednorms.data.registry import federation
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import open_federation
from tests.support.layouts import gradient, pickled, shared, sizes

SHEETS = ("mnist", "svhn", "usps", "synthdigits", "mnist_m")
FOLDERS = {"MNIST": (28, 28), "SVHN": (32, 32, 3), "USPS": (16, 16), "SynthDigits": (32, 32, 3), "MNIST_M": (28, 28, 3)}
needs_sheets = pytest.mark.skipif(
    not shared("digits-five").is_dir(), reason="no real data in ../shared/data/digits-five beside the repository"
)


def sheet(path, x):
    rows = -(-len(x) // 100)
    tiles = np.zeros((rows * 100, 28, 28, 3), np.uint8)
    tiles[: len(x)] = x
    Image.fromarray(tiles.reshape(rows, 100, 28, 28, 3).swapaxes(1, 2).reshape(rows * 28, 2800, 3)).save(
        path, lossless=True
    )


@pytest.fixture
def sheets(tmp_path):
    for i, name in enumerate(SHEETS):
        for part, n in (("train", 120), ("test", 30)):
            sheet(tmp_path / f"{name}_{part}.webp", gradient(n, (28, 28, 3), seed=i))
            np.save(tmp_path / f"{name}_{part}_labels.npy", (np.arange(n) % 10).astype(np.uint8))
    return tmp_path


@pytest.fixture
def release(tmp_path):
    """FedBN's release with 800 training images per domain."""
    for i, (folder, shape) in enumerate(FOLDERS.items()):
        for part, n in (("train", 800), ("test", 20)):
            pickled(tmp_path / folder / f"{part}.pkl", (gradient(n, shape, seed=i), np.arange(n) % 10))
    return tmp_path


def test_sheets_are_cut_into_tiles_in_order(sheets):
    fed = digits_five(sheets, protocol="full", complete=False)
    assert [s.name for s in fed.sites] == ["mnist", "svhn", "usps", "synthdigits", "mnist-m"]
    assert fed.shape == (3, 28, 28)
    for i, site in enumerate(fed.sites):
        tiles = torch.from_numpy(gradient(120, (28, 28, 3), seed=i)).permute(0, 3, 1, 2)
        assert torch.equal(site.train.x, tiles)
        assert site.train.y.tolist() == [k % 10 for k in range(120)]
    assert fed.preprocessing.mean == fed.preprocessing.std == (0.5, 0.5, 0.5)


def test_counts_that_are_not_the_published_ones(sheets):
    with pytest.raises(
        BadInput, match=r"(?s)not as published.*mnist: 7,318 of 7,438 images of train missing \(120 found\)"
    ):
        digits_five(sheets)
    assert any("7,318 of 7,438" in note for note in digits_five(sheets, complete=False).source["notes"])
    (sheets / "usps_test_labels.npy").unlink()
    (sheets / "svhn_train.webp").unlink()
    with pytest.raises(BadInput, match=r"(?s)svhn: nothing to read.*usps: usps_test_labels.npy is missing"):
        digits_five(sheets, complete=False)
    np.save(sheets / "mnist_train_labels.npy", np.zeros(500, np.uint8))
    with pytest.raises(BadInput, match=r"mnist_train.webp is 56x2800 pixels and .* has shape \(500,\)"):
        digits_five(sheets, complete=False)


def test_fedbn_release(release):
    with pytest.raises(BadInput, match=r"train.pkl is a pickled archive.* allow_pickle=True"):
        digits_five(release, complete=False)
    fed = digits_five(release, complete=False, allow_pickle=True)
    assert all(parts == {"train": 743, "test": 20} for parts in sizes(fed).values())
    assert fed.shape == (3, 28, 28)
    mnist = gradient(800, (28, 28), seed=0)
    assert torch.equal(fed.site("mnist").train.x, torch.from_numpy(mnist[:743]).unsqueeze(1).expand(-1, 3, -1, -1))
    small = Image.fromarray(gradient(800, (32, 32, 3), seed=1)[5]).resize((28, 28), Image.Resampling.BILINEAR)
    assert torch.equal(fed.site("svhn").train.x[5], torch.from_numpy(np.array(small)).permute(2, 0, 1))
    # The parts are enough, and .npz files need no flag.
    for folder, shape in FOLDERS.items():
        x, y = gradient(800, shape), np.arange(800) % 10
        for i in range(10):
            at = slice(80 * i, 80 * (i + 1))
            pickled(release / folder / "partitions" / f"train_part{i}.pkl", (x[at], y[at]))
        to_npz(release / folder / "test.pkl")
        (release / folder / "train.pkl").unlink()
    parts = digits_five(release, complete=False, allow_pickle=True)
    assert len(parts.site("usps").train) == 743
    for folder, shape in FOLDERS.items():
        to_npz(pickled(release / folder / "train.pkl", (gradient(800, shape), np.arange(800) % 10)))
    assert digits_five(release, complete=False).site("svhn").train.y[:12].tolist() == [*range(10), 0, 1]


def idx(path, array):
    data = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_raw_sources(tmp_path):
    from scipy.io import savemat

    y = np.arange(100) % 10
    grey = np.repeat(y[:, None, None], 28, 1).repeat(28, 2).astype(np.uint8) * 20
    for part, gz in (("train", ".gz"), ("t10k", "")):
        idx(tmp_path / "MNIST" / "raw" / f"{part}-images-idx3-ubyte{gz}", grey)
        idx(tmp_path / "MNIST" / "raw" / f"{part}-labels-idx1-ubyte{gz}", y)
    colour = np.repeat(grey[:, 0, 0][:, None, None, None], 32, 1).repeat(32, 2).repeat(3, 3)
    for folder, prefix in (("SVHN", ""), ("SynthDigits", "synth_")):
        (tmp_path / folder).mkdir()
        for part in ("train", "test"):
            labels = np.where(y == 0, 10, y)[:, None]
            savemat(tmp_path / folder / f"{prefix}{part}_32x32.mat", {"X": colour.transpose(1, 2, 3, 0), "y": labels})
    (tmp_path / "USPS").mkdir()
    for name in ("usps.bz2", "usps.t.bz2"):
        lines = [f"{k + 1} " + " ".join(f"{i + 1}:{k / 5 - 1}" for i in range(256)) for k in y]
        with bz2.open(tmp_path / "USPS" / name, "wt") as file:
            file.write("\n".join(lines))
    small = colour[:, :28, :28]
    data = {p: small for p in ("train", "valid", "test")} | {f"{p}_label": y for p in ("train", "valid", "test")}
    pickled(tmp_path / "MNIST_M" / "mnistm_data.pkl", data)
    fed = digits_five(tmp_path, complete=False, allow_pickle=True)
    assert sizes(fed)["mnist"] == {"train": 160, "test": 40}
    assert sizes(fed)["mnist-m"] == {"train": 240, "test": 60}
    assert fed.source["layout"] == "raw sources"
    for site in fed.sites:
        for split in site.splits.values():
            value = split.x[:, 0, 0, 0].long()
            scale = (split.y.double() / 10 * 255).long() if site.name == "usps" else split.y * 20
            assert (value - scale).abs().max() <= 1, "images keep their labels"
            assert torch.bincount(split.y, minlength=10).unique().numel() == 1, "stratified"


def test_protocols_by_name_and_recipe(sheets):
    for protocol in PROTOCOLS:
        if protocol == "fedwon-cross-device-1000":
            with pytest.raises(BadInput, match="120 images cannot be divided over 200 clients"):
                federation("digits-five", root=sheets, protocol=protocol, complete=False)
            continue
        fed = federation("digits-five", root=sheets, protocol=protocol, complete=False)
        assert fed.domains == fed.domains
        assert fed.source["protocol"] == protocol
    recipe = Recipe.from_toml(
        f'federation = "digits-five"\n[data]\nroot = "{sheets}"\nprotocol = "fednn"\ncomplete = false\nsize = 8'
    )
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert open_federation(recipe).shape == (3, 8, 8)
    with pytest.raises(BadInput, match='has no protocol "fedwn": did you mean "fedwon"'):
        federation("digits-five", root=sheets, protocol="fedwn")
    with pytest.raises(BadInput, match="needs root=FOLDER"):
        federation("digits-five")
    with pytest.raises(BadInput, match='no option "test"'):
        federation("digits-five", root=sheets, test=0.1)
    with pytest.raises(BadInput, match="It looks like digits-five"):
        federation(sheets)
    with pytest.raises(BadInput, match="has no protocols"):
        federation("digits-shift", protocol="fedwon")


def test_clients_that_share_a_domains_test_set_score_as_the_whole_set_does(sheets):
    """FedWon's cross-device tables have one number per domain: here 30 test images over 20 clients."""
    device = digits_five(sheets, "fedwon-cross-device", size=8, complete=False)
    whole = digits_five(sheets, "full", size=8, complete=False)
    assert {len(s.test) for s in device.sites} == {1, 2}
    result = fn.run("fedavg", device, "cnn-small", rounds=1, participation="fixed:0.05", lr=0.1, epochs=3)
    model, pooled = result.model(), []
    for domain in whole.domains:
        x, y = whole.site(domain).test.batch(range(30))
        with torch.no_grad():
            right = (model(whole.preprocessing(x)).argmax(1) == y).double()
        assert result.domains[domain] == pytest.approx(right.mean().item(), abs=1e-12)
        pooled.append(right)
    assert result.scores().pooled == pytest.approx(torch.cat(pooled).mean().item(), abs=1e-12)
    assert 0 < torch.cat(pooled).sum() < 150, "not a score that every weighting gives"


@needs_sheets
def test_real_sheets_have_the_papers_sizes():
    root = shared("digits-five")
    silo = digits_five(root)
    assert {s.name: len(s.train) for s in silo.sites} == dict.fromkeys(
        ("mnist", "svhn", "usps", "synthdigits", "mnist-m"), 743
    )
    assert [len(s.test) for s in silo.sites] == [4000, 4000, 1860, 4000, 4000]
    whole = digits_five(root, "full")
    device = digits_five(root, "fedwon-cross-device")
    assert len(device.clients) == 100
    for domain in whole.domains:
        mine = [s for s in device.sites if s.domain == domain]
        assert {len(s.train) for s in mine} == {371, 372}
        assert sum(len(s.train) for s in mine) == 7438
        for part in ("train", "test"):
            together = torch.cat([s.splits[part].x for s in mine]).flatten(1).sum(1).sort().values
            assert torch.equal(together, whole.site(domain).splits[part].x.flatten(1).sum(1).sort().values)
        assert torch.equal(silo.site(domain).train.x, whole.site(domain).train.x[:743])
    nn = digits_five(root, "fednn")
    assert [s.name for s in nn.sites] == ["mnist", "mnist-m", "svhn", "synthdigits", "usps"]
    assert nn.shape == (3, 32, 32)
    assert {len(s.train) for s in nn.sites} == {371}
    # MNIST-M shows the same digits as MNIST, in the same order.
    assert torch.equal(whole.site("mnist").train.y, whole.site("mnist-m").train.y)


@needs_sheets
def test_one_epoch_on_real_digits_learns_something():
    from fednorms.data import Federation, Site

    whole = digits_five(shared("digits-five"))
    sites = [
        Site(s.name, s.domain, s.train.subset(range(200)), test=s.test.subset(range(100)))
        for s in whole.sites
        if s.name in ("mnist", "usps")
    ]
    small = Federation("two", sites, whole.classes, whole.preprocessing)
    result = fn.run("fedbn", small, "cnn-small", rounds=2, epochs=1, batch_size=10, lr=0.05)
    assert result.scores().mean > 0.3, "three times chance"
