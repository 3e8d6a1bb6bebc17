"""Readers of image folders: PACS, VLCS, Office and DomainNet in tiny copies, and the papers' rules on real counts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.data.pickles import to_npz
from fednorms.data.readers import divisions, domainnet, office, pacs_vlcs, recognized
from fednorms.data.readers.pictures import Pictures
from fednorms.data.registry import federation
from tests.support.layouts import class_folders, first_values, pickled, picture, sizes

LABELS = {
    "pacs": {d: np.repeat(np.arange(7), c) for d, c in pacs_vlcs.PACS_COUNTS.items()},
    "vlcs": {d: np.repeat(np.arange(5), c) for d, c in pacs_vlcs.VLCS_COUNTS.items()},
}


def options(tmp_path, **more):
    return {"complete": False, "size": 4, "cache": False, **more}


def test_fednn_rule_gives_the_test_sets_of_its_tables():
    for name, total, tested in (("pacs", 9991, 986), ("vlcs", 10729, 1064)):
        parts = {d: divisions.tenth_per_class(y, 0, d) for d, y in LABELS[name].items()}
        assert sum(len(p["test"]) for p in parts.values()) == tested
        assert sum(len(at) for p in parts.values() for at in p.values()) == total
        for domain, y in LABELS[name].items():
            counts = np.bincount(y[parts[domain]["test"]], minlength=y.max() + 1)
            assert counts.tolist() == [n // 10 for n in np.bincount(y)]


def test_greg_rule_gives_its_table_6():
    for name, shares, train, val, tests in (
        ("pacs", (0.5, 0.2), 584, 233, [615, 704, 501, 1179]),
        ("vlcs", (0.3, 0.3), 297, 297, [425, 797, 985, 1013]),
    ):
        parts = divisions.greg(LABELS[name], *shares, seed=0)
        assert [len(p["test"]) for p in parts.values()] == tests
        assert {(len(p["train"]), len(p["val"])) for p in parts.values()} == {(train, val)}
        for p in parts.values():
            everything = np.concatenate(list(p.values()))
            assert len(set(everything.tolist())) == len(everything), "disjoint"
    hospitals = {str(i): np.arange(n) % 2 for i, n in enumerate((59_436, 34_904, 85_054, 129_838, 146_722))}
    parts = divisions.greg(hospitals, 0.4, 0.4, 0, subsample=0.03)
    assert [len(p["test"]) for p in parts.values()] == [536, 315, 766, 1169, 1321]
    assert {(len(p["train"]), len(p["val"])) for p in parts.values()} == {(293, 293)}
    assert sum(len(p["train"]) for p in divisions.greg(LABELS["pacs"], 1.0, 0.0, 0).values()) // 4 == 1169
    assert 1169 // 25 == 46


def test_pacs_flat(tmp_path):
    root = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 12)
    fed = pacs_vlcs.pacs(tmp_path, **options(tmp_path))
    assert [s.name for s in fed.sites] == ["art_painting", "cartoon", "photo", "sketch"]
    assert all(parts == {"train": 7 * 11, "test": 7} for parts in sizes(fed).values())
    for i, site in enumerate(fed.sites):
        values = first_values(site.train) + first_values(site.test)
        assert sorted(values) == list(range(84 * i, 84 * (i + 1))), "every image once"
        assert [v % 84 // 12 for v in first_values(site.train)] == site.train.y.tolist(), "with its label"
    greg = federation("pacs", root=root, protocol="greg", size=4, complete=False)
    # n = 84: test ceil(25.2) = 26, pool 58, train 29, val 11.
    assert all(parts == {"train": 29, "val": 11, "test": 26} for parts in sizes(greg).values())
    assert greg.preprocessing.mean is None
    device = pacs_vlcs.pacs(root, protocol="greg-cross-device", **options(tmp_path))
    assert len(device.clients) == 100
    assert {len(s.train) for s in device.sites} == {2}
    assert sum(len(s.test) for s in device.sites if s.domain == "photo") == 26
    with pytest.raises(BadInput, match=r"no list art_painting_train_kfold\.txt"):
        pacs_vlcs.pacs(root, protocol="official", **options(tmp_path))


def test_cross_device_clients_are_tested_on_a_mix_of_classes():
    """Real counts, listed by class as on disk: no client's test images are of one class only."""
    found = {
        domain: Pictures([Path(domain)] * sum(counts), np.repeat(np.arange(7), counts))
        for domain, counts in pacs_vlcs.PACS_COUNTS.items()
    }
    members = pacs_vlcs._divided("pacs", found, "greg-cross-device", 0, (0.5, 0.2), (25, 46))
    other = pacs_vlcs._divided("pacs", found, "greg-cross-device", 1, (0.5, 0.2), (25, 46))
    for domain, pictures in found.items():
        mine = [m for m in members if m.domain == domain]
        whole = np.concatenate([m.parts["test"] for m in mine])
        assert len(np.unique(whole)) == len(whole) == math.ceil(0.3 * len(pictures)), "every test image once"
        mix = np.bincount(pictures.y[whole], minlength=7) / len(whole)
        for member in mine:
            own = np.bincount(pictures.y[member.parts["test"]], minlength=7) / len(member.parts["test"])
            assert (own > 0).sum() >= 4
            assert abs(own - mix).sum() / 2 < 0.5, "total variation distance from the domain's mix"
    assert any((a.parts["test"] != b.parts["test"]).any() for a, b in zip(members, other, strict=True)), "by seed"


def test_missing_and_extra_images_are_reported(tmp_path):
    root = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 2)
    picture(root / "photo" / "cat" / "1.png", 1)
    with pytest.raises(BadInput) as caught:
        pacs_vlcs.pacs(root, cache=False)
    assert 'photo: folder "cat" is not one of the 7 classes' in str(caught.value)
    assert "art_painting: 377 of 379 images of dog missing (2 found)" in str(caught.value)
    assert "complete=False" in str(caught.value)
    for path in (root / "sketch").rglob("*.png"):
        path.unlink()
    for path in sorted((root / "sketch").iterdir()):
        path.rmdir()
    (root / "sketch").rmdir()
    with pytest.raises(BadInput, match="sketch: no folder sketch"):
        pacs_vlcs.pacs(root, **options(tmp_path))
    with pytest.raises(BadInput, match="does not hold this data set; expected ROOT/"):
        pacs_vlcs.pacs(tmp_path / "PACS" / "photo", **options(tmp_path))


def test_pacs_kfold(tmp_path):
    base = class_folders(tmp_path / "kfold", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 3)
    for domain in pacs_vlcs.PACS_COUNTS:
        for word, numbers in (("train", (0, 2)), ("crossval", (1,))):
            lines = [
                f"{domain}/{label}/{k:03d}.png {i + 1}"
                for i, label in enumerate(pacs_vlcs.PACS_CLASSES)
                for k in numbers
            ]
            (tmp_path / f"{domain}_{word}_kfold.txt").write_text("\n".join(lines) + "\n")
    assert pacs_vlcs.pacs_layout(tmp_path) == "official (kfold)"
    fed = pacs_vlcs.pacs(tmp_path, protocol="official", **options(tmp_path))
    assert all(parts == {"train": 14, "val": 7} for parts in sizes(fed).values())
    held = fed.hold_out("sketch").site("sketch")
    assert len(held.test) == 21, "a held-out domain is tested on everything"
    assert sorted(first_values(held.test)) == list(range(63, 84))
    assert [v % 21 // 3 for v in first_values(fed.site("photo").val)] == fed.site("photo").val.y.tolist()
    (tmp_path / "photo_train_kfold.txt").write_text("../../etc/passwd 1\n")
    with pytest.raises(BadInput, match="not inside the data set"):
        pacs_vlcs.pacs(tmp_path, protocol="official", **options(tmp_path))
    assert base.is_dir()


def test_vlcs_in_both_layouts(tmp_path):
    flat = class_folders(tmp_path / "flat", pacs_vlcs.VLCS_COUNTS, pacs_vlcs.VLCS_CLASSES, 10)
    one = pacs_vlcs.vlcs(flat, **options(tmp_path))
    other = tmp_path / "VLCS"
    names = dict(zip(pacs_vlcs.VLCS_COUNTS, ("CALTECH", "LABELME", "SUN", "PASCAL"), strict=True))
    for domain, name in names.items():
        for i, label in enumerate(pacs_vlcs.VLCS_CLASSES):
            for k in range(10):
                source = flat / domain / label / f"{k:03d}.png"
                for part in ("full", "train" if k < 7 else "test"):
                    target = other / name / part / str(i) / source.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(source.read_bytes())
    two = pacs_vlcs.vlcs(tmp_path, **options(tmp_path))
    assert one.fingerprint() == two.fingerprint(), "full is read, not the copies in train and test"
    assert sizes(one)["SUN09"] == {"train": 45, "test": 5}
    for name in names.values():  # some copies have no "full"
        shutil.rmtree(other / name / "full")
    assert pacs_vlcs.vlcs_layout(other) == "split folders with numbered classes"
    three = pacs_vlcs.vlcs(other, **options(tmp_path))
    for a, b in zip(one.sites, three.sites, strict=True):
        held = [sorted(v for part in site.splits.values() for v in first_values(part)) for site in (a, b)]
        assert held[0] == held[1], "train, crossval and test together are everything"
    greg = pacs_vlcs.vlcs(flat, protocol="greg", **options(tmp_path))
    assert sizes(greg)["LabelMe"] == {"train": 10, "val": 10, "test": 15}


def test_office_home_and_31(tmp_path):
    spelt = class_folders(tmp_path / "OfficeHome", ("Art", "Clipart", "Product", "Real_World"), office.HOME_CLASSES, 1)
    picture(spelt / "Art" / "Bed" / "x.png", 3)
    home = office.office_home(tmp_path, **options(tmp_path, complete=False))
    assert home.num_classes == 65
    assert home.protocol.augment == "feddyn"
    assert [s.name for s in home.sites] == ["Art", "Clipart", "Product", "Real World"]
    for domain in ("amazon", "dslr", "webcam"):
        class_folders(tmp_path / "office31" / domain, ("images",), office.OFFICE31_CLASSES, 3)
    office31 = office.office_31(tmp_path, val=0, test=1 / 3, **options(tmp_path))
    assert office31.num_classes == 31
    assert set(map(str, sizes(office31).values())) == {"{'train': 62, 'test': 31}"}
    assert [r.name for r, _ in recognized(tmp_path / "office31")] == ["office-31"]
    assert sum(office.OFFICE31_COUNTS.values()) == 4110, "as published"
    with pytest.raises(BadInput, match=r"(?s)2,724 of 2,817 images of amazon.*405 of 498 images of dslr.*702 of 795"):
        office.office_31(tmp_path, cache=False)


@pytest.fixture
def caltech(tmp_path):
    root = class_folders(tmp_path / "office_caltech_10", office.CALTECH_LISTS, office.CALTECH_CLASSES, 5)
    for domain in office.CALTECH_LISTS:
        every = [(f"office_caltech_10/{domain}/{c}/{k:03d}.png", c) for k in range(5) for c in office.CALTECH_CLASSES]
        for part, pairs in (("train", every[10:]), ("test", every[:10])):
            pickled(root / f"{domain}_{part}.pkl", (np.array([p for p, _ in pairs]), [c for _, c in pairs]))
    return root


@pytest.mark.parametrize("inside", ["", "images", "Office Caltech"])
def test_office_caltech_as_it_circulates(inside, tmp_path):
    """caltech10, backpack and laptop, perhaps one folder deeper, are the federation of FedBN's spellings."""
    other = {"back_pack": "backpack", "laptop_computer": "laptop"}
    named = [other.get(name, name) for name in office.CALTECH_CLASSES]
    domains = ["amazon", "caltech10", "dslr", "webcam"]
    found = class_folders(tmp_path / "new" / inside, domains, named, 5)
    usual = class_folders(tmp_path / "usual", office.CALTECH_LISTS, office.CALTECH_CLASSES, 5)
    fed = office.office_caltech_10(tmp_path / "new", **options(tmp_path))
    assert fed.classes == office.CALTECH_CLASSES
    assert fed.fingerprint() == office.office_caltech_10(usual, **options(tmp_path)).fingerprint()
    assert "office-caltech-10" in [reader.name for reader, _ in recognized(found)]


def test_a_missing_class_is_refused_with_the_spellings_and_the_folders_of_other_names(tmp_path):
    named = ["notebook" if name == "laptop_computer" else name for name in office.CALTECH_CLASSES]
    class_folders(tmp_path, office.CALTECH_LISTS, named, 5)
    with pytest.raises(
        BadInput, match="dslr: no images of laptop_computer or laptop; folders of other names: notebook"
    ):
        office.office_caltech_10(tmp_path, **options(tmp_path))


def test_a_refusal_names_the_layouts_and_copies_that_it_found(tmp_path):
    picture(tmp_path / "shop" / "lamp" / "1.png", 1)
    with pytest.raises(
        BadInput, match=r"\[images/\].*also caltech10, backpack, laptop.*one folder inside.*holds shop/"
    ):
        office.office_caltech_10(tmp_path)
    for copy in ("first", "second"):
        class_folders(tmp_path / copy, pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 1)
    with pytest.raises(BadInput, match=r"several copies \(first, second\)"):
        pacs_vlcs.pacs(tmp_path)


def test_office_caltech_takes_the_start_and_the_end_of_the_lists(caltech, tmp_path):
    with pytest.raises(BadInput, match="allow_pickle=True"):
        office.office_caltech_10(caltech, **options(tmp_path))
    fed = office.office_caltech_10(tmp_path, allow_pickle=True, **options(tmp_path))
    # m = 40: the first 20, the last 16.
    assert all(parts == {"train": 20, "val": 16, "test": 10} for parts in sizes(fed).values())
    for i, site in enumerate(fed.sites):
        at = [50 * i + 5 * c + k for k in range(5) for c in range(10)]
        assert first_values(site.train) == at[10:30]
        assert first_values(site.val) == at[34:50]
        assert first_values(site.test) == at[:10]
        assert site.val.y.tolist() == [(v - 50 * i) // 5 for v in at[34:50]]
    assert fed.preprocessing.mean is None
    for path in sorted(caltech.glob("*.pkl")):
        to_npz(path)
        path.unlink()
    assert office.office_caltech_10(caltech, **options(tmp_path)).fingerprint() == fed.fingerprint()
    for path in caltech.glob("*.npz"):
        path.unlink()
    drawn = office.office_caltech_10(caltech, **options(tmp_path))
    assert sizes(drawn) == sizes(fed)
    assert any("lists were not there" in note for note in drawn.source["notes"])
    full = office.office_caltech_10(caltech, protocol="full", **options(tmp_path))
    assert sizes(full)["dslr"] == {"train": 40, "test": 10}


def test_the_papers_sizes_follow_from_the_lists():
    m = min(train for train, _ in office.CALTECH_LISTS.values())
    assert (int(0.5 * m), int(0.4 * m)) == (62, 50)
    m = min(train for train, _ in domainnet.TEN_LISTS.values())
    assert [int(share * m) for share in (0.05, 0.3, 0.1)] == [105, 630, 210]
    assert sum(map(sum, domainnet.FULL_LISTS.values())) == 586_575
    assert list(domainnet.TEN_CLASSES) == sorted(domainnet.TEN_CLASSES)


def test_domainnet_ten_classes(tmp_path):
    root = class_folders(tmp_path / "DomainNet", domainnet.TEN_LISTS, (*domainnet.TEN_CLASSES, "aircraft_carrier"), 5)
    fed = domainnet.domainnet(root, **options(tmp_path))
    assert fed.num_classes == 10, "other classes are left alone"
    assert fed.protocol.augment == "flip_rotate"
    # 40 training images per domain: 5 % are 2.
    assert sizes(fed)["quickdraw"] == {"train": 2, "val": 2, "test": 10}
    assert sizes(domainnet.domainnet(root, protocol="greg", **options(tmp_path)))["real"] == {
        "train": 12,
        "val": 4,
        "test": 10,
    }
    with pytest.raises(BadInput, match=r"the official list clipart_train\.txt is missing"):
        domainnet.domainnet(root, protocol="fednn", **options(tmp_path))


def test_domainnet_official_lists(tmp_path):
    classes = [f"class_{i:02d}" for i in range(4)]
    root = class_folders(tmp_path, domainnet.TEN_LISTS, classes, 4)
    for domain in domainnet.TEN_LISTS:
        for part, numbers in (("train", (0, 1, 2)), ("test", (3,))):
            lines = [f"{domain}/{c}/{k:03d}.png {i}" for i, c in enumerate(classes) for k in numbers]
            (root / f"{domain}_{part}.txt").write_text("\n".join(lines))
    fed = domainnet.domainnet(root, protocol="fednn", **options(tmp_path))
    assert fed.classes == tuple(classes)
    assert fed.protocol.augment == "feddyn"
    assert all(parts == {"train": 12, "test": 4} for parts in sizes(fed).values())
    (root / "real" / "class_01" / "000.png").unlink()
    with pytest.raises(BadInput, match="real, train: 1 of 12 listed images missing"):
        domainnet.domainnet(root, protocol="fednn", size=4, cache=False)
    assert sizes(domainnet.domainnet(root, protocol="fednn", **options(tmp_path)))["real"] == {"train": 11, "test": 4}


def test_top_classes_and_clients_in_proportion():
    found = {
        "a": domainnet.Pictures([f"a{i}" for i in range(60)], np.repeat([0, 1, 2], 20)),
        "b": domainnet.Pictures([f"b{i}" for i in range(30)], np.repeat([1, 2], 15)),
    }
    parts = {"a": {"train": np.arange(60), "test": np.arange(0)}, "b": {"train": np.arange(30), "test": np.arange(0)}}
    assert domainnet.top_classes(np.array([20, 35, 35]), 2).tolist() == [1, 2]
    share = domainnet.clients_per_domain({d: len(p["train"]) for d, p in parts.items()}, 9)
    assert share == {"a": 6, "b": 3}
    real = {d: train for d, (train, _) in domainnet.FULL_LISTS.items()}
    assert sum(domainnet.clients_per_domain(real).values()) == 200
    assert found["a"].y.max() == 2


def test_domainnet_top_hundred_on_disk(tmp_path):
    """GReg cross-device: 100 largest classes over all domains, 200 clients in proportion, equal training sizes each."""
    classes = [f"class_{i:03d}" for i in range(103)]
    small = {5, 50, 102}  # one training image less over all domains than any other class
    twice = {"real": 2}
    value = 0
    for domain in domainnet.TEN_LISTS:
        lines = {"train": [], "test": []}
        for i, label in enumerate(classes):
            for k in range(twice.get(domain, 1) + 1 - (i in small and domain == "sketch")):
                name = f"{domain}/{label}/{k}.png"
                picture(tmp_path / name, value)
                value += 1
                lines["test" if k == 0 else "train"].append(f"{name} {i}")
        for part, said in lines.items():
            (tmp_path / f"{domain}_{part}.txt").write_text("\n".join(said))
    fed = domainnet.domainnet(tmp_path, protocol="greg-top100", **options(tmp_path))
    kept = [label for i, label in enumerate(classes) if i not in small]
    assert fed.classes == tuple(kept)
    assert len(fed.clients) == 200
    # 100 training images in five domains, 200 in the sixth: 700 over 200 clients.
    clients = {d: [s for s in fed.clients if s.domain == d] for d in fed.domains}
    assert {d: len(sites) for d, sites in clients.items()} == {
        d: 57 if d == "real" else 29 if n < 3 else 28 for n, d in enumerate(d for d in domainnet.TEN_LISTS)
    }
    for sites in clients.values():
        assert {len(s.train) for s in sites} == {3}, "equal, and as many as the domain has for each"
        assert sum(len(s.test) for s in sites if s.test) == 100, "every test image of the domain once"
        taken = [v for s in sites for part in s.splits.values() for v in first_values(part)]
        assert len(taken) == len(set(taken)), "nobody shares an image"
    assert fed.protocol.augment == "flip_rotate"
    assert fed.preprocessing.mean is None


def test_images_that_do_not_fit_in_memory_stay_on_disk(tmp_path):
    from fednorms.data import MappedImages

    root = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 10)
    lazy = pacs_vlcs.pacs(root, size=4, complete=False, cache=tmp_path / "cache", memory_limit=0)
    assert isinstance(lazy.sites[0].train.x, MappedImages)
    assert lazy.fingerprint() == pacs_vlcs.pacs(root, **options(tmp_path)).fingerprint()
    assert torch.equal(lazy.sites[0].train.x[:2], lazy.sites[0].train.subset([0, 1]).x[:])
