"""Packs: what goes in comes out, lazily; damaged and foreign files are refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import struct

import numpy as np
import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.data import Federation, Site, Split, from_arrays
from fednorms.data.pack import pack
from fednorms.data.packed import PackedImages, check_pack, unpacked
from fednorms.data.readers.isic import fed_isic2019
from fednorms.data.registry import federation
from tests.support import data_sets
from tests.support.layouts import gradient


def images(channels=3, dtype=torch.uint8, sites=3, seed=0):
    """Sites with smooth pictures, which a lossy codec changes little."""
    made = []
    for i in range(sites):
        rows = torch.linspace(0, 200, 12).view(1, 1, 12, 1)
        x = (rows + torch.arange(10).view(10, 1, 1, 1) * 5 + i).expand(10, channels, 12, 12).contiguous()
        x = x.to(torch.uint8) if dtype == torch.uint8 else x.to(dtype) / 255
        y = torch.arange(10) % 3
        attributes = {"scanner": f"S{i}"}
        if i < sites - 1:
            made.append(
                Site(f"s{i}", f"d{i % 2}", Split(x[:6], y[:6]), Split(x[6:7], y[6:7]), Split(x[7:], y[7:]), attributes)
            )
        else:
            made.append(Site(f"s{i}", "new", test=Split(x, y)))
    return Federation("smooth", made, ["a", "b", "c"], source={"spec": "test"})


@pytest.mark.parametrize("codec", ["raw", "png", "webp"])
def test_what_goes_in_comes_out(tmp_path, codec):
    original = images()
    back = unpacked(pack(original, tmp_path / "p.fnpack", codec))
    assert back.fingerprint() == original.fingerprint()
    assert back.classes == original.classes
    assert back.preprocessing == original.preprocessing
    assert back.source["packed_from"] == {"spec": "test"}
    for site in original.sites:
        twin = back.site(site.name)
        assert twin.domain == site.domain
        assert twin.attributes == site.attributes
        for part, split in site.splits.items():
            lazy = twin.splits[part]
            assert isinstance(lazy.x, PackedImages)
            order = torch.randperm(len(split))
            for wanted, got in zip(split.batch(order), lazy.batch(order), strict=True):
                assert torch.equal(wanted, got)
            assert torch.equal(lazy.subset(order[:1]).x[:], split.x[order[:1]])
            assert torch.equal(lazy.x[0], split.x[0])
    assert unpacked(tmp_path / "p.fnpack").hold_out("d0").unseen[0].test is not None
    pooled, expected = back.pooled(), original.pooled()
    assert pooled.fingerprint() == expected.fingerprint()
    assert isinstance(pooled.clients[0].train.x, PackedImages)


def test_gray_and_float_images(tmp_path):
    grey = images(channels=1)
    for codec in ("raw", "png"):
        assert unpacked(pack(grey, tmp_path / f"{codec}.fnpack", codec)).fingerprint() == grey.fingerprint()
    for dtype in (torch.float32, torch.float64):
        floats = images(dtype=dtype)
        back = unpacked(pack(floats, tmp_path / f"{dtype}.fnpack"))
        assert back.fingerprint() == floats.fingerprint()
        assert back.sites[0].train.x.dtype == dtype


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_a_stated_quality_is_near_and_smaller(tmp_path, codec):
    original = from_arrays(
        {"a": (np.stack([np.indices((64, 64)).sum(0) % 250] * 8).astype(np.uint8) // 2, np.arange(8) % 2)}, channels=3
    )
    raw = pack(original, tmp_path / "raw.fnpack")
    lossy = pack(original, tmp_path / "lossy.fnpack", codec, quality=90)
    assert lossy.stat().st_size < raw.stat().st_size / 2
    back = unpacked(lossy)
    assert back.source["quality"] == 90
    for part, split in original.sites[0].splits.items():
        assert (back.sites[0].splits[part].x[:].float() - split.x.float()).abs().mean() < 3
    assert pack(original, tmp_path / "q.fnpack", quality=50).stat().st_size > 0
    assert unpacked(tmp_path / "q.fnpack").source["codec"] == "jpeg"


def test_equal_images_are_stored_once(tmp_path):
    test = Split(torch.from_numpy(gradient(50, (3, 16, 16))), torch.zeros(50, dtype=torch.int64))
    clients = [Site(f"c{i}", "d", Split(test.x[i : i + 1], test.y[:1]), test=test) for i in range(20)]
    path = pack(Federation("shared", clients, ["a"]), tmp_path / "p.fnpack")
    assert check_pack(path)["images"] == 50
    assert path.stat().st_size < 2 * 50 * 3 * 16 * 16
    assert torch.equal(unpacked(path).site("c7").train.x[:], test.x[7:8])


def test_by_name(tmp_path):
    path = pack(images(), tmp_path / "p.fnpack")
    other = pack(images(), tmp_path / "without-ending")
    for spec, root in ((str(path), None), (f"pack:{path}", None), ("p.fnpack", tmp_path), (f"pack:{other}", None)):
        assert federation(spec, root=root).num_classes == 3
    assert federation(federation(str(path)).source["spec"]).num_classes == 3
    with pytest.raises(BadInput, match="packed: size"):
        federation(path, size=4)
    with pytest.raises(BadInput, match="no such file"):
        federation("pack:/no/such.fnpack")


def test_it_is_cheap_to_send_to_a_worker(tmp_path):
    split = unpacked(pack(images(), tmp_path / "p.fnpack")).site("s0").train
    sent = pickle.dumps(split.x)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[:], split.x[:])


def test_a_run_on_a_pack_is_the_run_on_its_source(tmp_path):
    import fednorms as fn

    original = images()
    packed = unpacked(pack(original, tmp_path / "p.fnpack"))
    options = {"method": "fedbn", "rounds": 1, "model": "cnn-small", "batch_size": 3}
    one, two = (fn.run(federation=f, **options).scores() for f in (original, packed))
    assert one == two


def damaged(path, where, with_=b"\xff\xfe"):
    data = bytearray(path.read_bytes())
    where %= len(data)
    data[where : where + len(with_)] = with_
    path.write_bytes(bytes(data))
    return path


def test_damage_is_found(tmp_path):
    path = pack(images(), tmp_path / "p.fnpack")
    whole = path.read_bytes()
    check_pack(path)
    with pytest.raises(BadInput, match="its header is damaged"):
        unpacked(damaged(path, -20))
    path.write_bytes(whole)
    with pytest.raises(BadInput, match=r"data are damaged near byte 64 \(the hash differs\)"):
        check_pack(damaged(path, 200))
    for length in (0, 4, 30, 64, 500, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput, match=r"truncated|not made by"):
            unpacked(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadInput, match=r"damaged: .* bytes, expected"):
        unpacked(path)
    path.write_bytes(whole)
    with pytest.raises(BadInput, match="version 255"):
        unpacked(damaged(path, 8, b"\xff"))


def test_foreign_files_are_refused(tmp_path):
    for name, content in (("a.zip", b"PK\x03\x04" * 50), ("text.fnpack", b"hello"), ("empty.fnpack", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match="not made by `fednorms data pack`"):
            unpacked(tmp_path / name)
    with pytest.raises(BadInput, match="a folder"):
        unpacked(tmp_path)


def with_header(path, change):
    """The same pack with another header, whose hash is right: it is still not believed."""
    whole = path.read_bytes()
    at, length = struct.unpack("<QQ", whole[16:32])
    header = json.loads(whole[at : at + length])
    made = change(header)
    text = json.dumps(header if made is None else made).encode()
    start = whole[:16] + struct.pack("<QQ", at, len(text)) + hashlib.blake2b(text, digest_size=16).digest()
    path.write_bytes(start + whole[len(start) : at] + text)
    return path


def as_in_0_1(header):
    del header["blocks"]["hashes"], header["covered"], header["hashes_hash"]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["blocks"].update(images=[64, 10**9]),
        lambda h: h["blocks"].update(labels=[64, 4]),
        lambda h: h.update(images=h["images"] + 1),
        lambda h: h.update(codec="raw"),
        lambda h: h["sites"][0]["splits"].update(train=[10**6, 6]),
        lambda h: h["blocks"].pop("begins") and None,
    ],
)
def test_tables_that_point_outside_are_refused(tmp_path, change):
    with pytest.raises(BadInput, match="tables do not fit"):
        unpacked(with_header(pack(images(), tmp_path / "p.fnpack", "png"), change))


KEYS = ["name", "classes", "preprocessing", "source", "shape", "dtype", "codec", "quality", "images", "blocks", "sites"]


@pytest.mark.parametrize(
    "change",
    [
        *[lambda h, key=key: {k: v for k, v in h.items() if k != key} for key in KEYS],
        *[lambda h, key=key: {**h, key: None} for key in KEYS if key != "quality"],
        lambda h: [],
        lambda h: "text",
        lambda h: h.update(shape=[3, -12, -12]),
        lambda h: h.update(shape=[3, 12]),
        lambda h: h.update(shape=[3, 10**6, 10**6]),
        lambda h: h.update(shape=[10**6, 12, 12]),
        lambda h: h.update(images=-1),
        lambda h: h.update(images=10**30),
        lambda h: h.update(dtype="O"),
        lambda h: h.update(codec="eps"),
        lambda h: h["sites"][0]["splits"].update(train=[-1, 6]),
        lambda h: h["sites"][0]["splits"].update(train=[0, -6]),
        lambda h: h["sites"][0]["splits"].update(other=[0, 0]),
        lambda h: h["sites"][0].pop("domain") and None,
        lambda h: h["blocks"].pop("labels") and None,
        lambda h: h["blocks"].update(rows=[-64, 8]),
        lambda h: h.update(preprocessing={"mean": 3}),
        lambda h: h.update(protocol={"augment": [], "loss": {}, "metric": 3, "class_weights": 3}),
    ],
)
def test_crafted_headers_are_refused_with_the_key(tmp_path, change):
    with pytest.raises(BadInput, match=r"its header is not one that fednorms writes \(.+\); create it again"):
        unpacked(with_header(pack(images(), tmp_path / "p.fnpack"), change))


@pytest.mark.parametrize("text", [b"{", b"\xff", 10**5 * b"["])
def test_a_header_that_is_not_json_is_refused(tmp_path, text):
    path = pack(images(), tmp_path / "p.fnpack")
    whole = path.read_bytes()
    (at,) = struct.unpack("<Q", whole[16:24])
    start = whole[:16] + struct.pack("<QQ", at, len(text)) + hashlib.blake2b(text, digest_size=16).digest()
    path.write_bytes(start + whole[len(start) : at] + text)
    with pytest.raises(BadInput, match="header is not JSON"):
        unpacked(path)


@pytest.mark.parametrize("codec", ["raw", "png", "jpeg"])
def test_no_flipped_bit_is_trained_on(tmp_path, codec):
    path = pack(images(), tmp_path / "p.fnpack", codec, 90 if codec == "jpeg" else None)
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(20):
        at = draw.randrange(64, len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(BadInput, match=r"p\.fnpack.*damaged"):
            unpacked(path).fingerprint()


def test_only_what_is_read_is_checked(tmp_path):
    x = torch.randint(256, (100, 3, 64, 64), dtype=torch.uint8)  # several blocks
    path = pack(Federation("f", [Site("a", "a", Split(x, torch.arange(100) % 2))], ["a", "b"]), tmp_path / "p.fnpack")
    damaged(path, 64 + 30 * 3 * 64 * 64)
    train = unpacked(path).site("a").train
    assert torch.equal(train.x[:20], x[:20])
    with pytest.raises(BadInput, match=r"damaged near byte 262,208"):
        train.x[[30]]
    with pytest.raises(BadInput, match="data are damaged"):
        check_pack(path)


def test_a_pack_of_version_0_1_has_no_hashes_and_opens(tmp_path):
    path = with_header(pack(images(), tmp_path / "p.fnpack"), as_in_0_1)
    assert unpacked(path).fingerprint() == images().fingerprint()
    damaged(path, 64)
    unpacked(path).fingerprint()  # nothing to compare with
    with pytest.raises(BadInput, match=r"data are damaged \(the hash differs\)"):
        check_pack(path)


def test_a_damaged_image_of_version_0_1_is_named(tmp_path):
    path = with_header(pack(images(), tmp_path / "p.fnpack", "png"), as_in_0_1)
    site = unpacked(damaged(path, 64, b"\0" * 16)).site("s0")
    with pytest.raises(BadInput, match="image 0 is damaged"):
        site.train.x[:]
    assert site.train.x[1:].shape[0] == 5


def test_an_image_of_another_size_is_refused_before_it_is_decoded(tmp_path):
    def smaller(header):
        as_in_0_1(header)
        header["shape"] = [3, 6, 6]

    site = unpacked(with_header(pack(images(), tmp_path / "p.fnpack", "png"), smaller)).site("s0")
    with pytest.raises(BadInput, match="12 x 12 pixels, not 6 x 6"):
        site.train.x[:]


@pytest.mark.parametrize(
    ("codec", "quality", "message"),
    [
        ("jpeg", None, "needs a quality"),
        ("raw", 80, "is for jpeg or webp"),
        ("jpeg", 0, "1 to 100"),
        ("gif", None, "codec must be"),
    ],
)
def test_bad_options(tmp_path, codec, quality, message):
    with pytest.raises(BadInput, match=message):
        pack(images(), tmp_path / "p.fnpack", codec, quality)
    assert not os.listdir(tmp_path)
    with pytest.raises(BadInput, match="needs uint8"):
        pack(images(dtype=torch.float32), tmp_path / "p.fnpack", quality=80)


def test_an_interrupted_pack_leaves_nothing_and_keeps_the_old_one(tmp_path):
    path = pack(images(), tmp_path / "p.fnpack")
    before = path.read_bytes()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(images(sites=4), path, progress=stop)
    assert os.listdir(tmp_path) == ["p.fnpack"]
    assert path.read_bytes() == before


def test_a_thousand_clients_take_no_memory(tmp_path):
    import tracemalloc

    x = torch.from_numpy(gradient(2000, (3, 32, 32)))
    clients = [Site(f"c{i:04d}", "d", Split(x[2 * i : 2 * i + 2], torch.tensor([0, 1]))) for i in range(1000)]
    path = pack(Federation("many", clients, ["a", "b"]), tmp_path / "p.fnpack")
    tracemalloc.start()
    many = unpacked(path)
    cohort = [site.train.batch([0, 1])[0] for site in many.clients[::100]]
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(cohort) == 10
    assert held < 3 * 2**20, f"{held} bytes for a cohort of 60 kB, where the federation has 6 MB"


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fednorms.data.pack._write", full)
    with pytest.raises(BadInput, match=r"Cannot write .*small.fnpack: No space left on device"):
        pack(from_arrays({"a": (np.zeros((5, 4, 4), np.uint8), np.arange(5) % 2)}), tmp_path / "small.fnpack")
    assert not list(tmp_path.iterdir())


def test_a_pack_keeps_what_a_reader_noted(tmp_path):
    """That a split was drawn, or a center is missing, is still said when the data come from a pack."""
    data_sets.fed_isic2019(tmp_path / "skin")
    found = fed_isic2019(tmp_path / "skin", complete=False, size=10, cache=False)
    assert found.source["notes"]
    pack(found, tmp_path / "skin.fnpack")
    opened = unpacked(tmp_path / "skin.fnpack")
    assert (opened.source["notes"], opened.source["prepared"]) == (found.source["notes"], found.source["prepared"])
    assert opened.fingerprint() == found.fingerprint()
