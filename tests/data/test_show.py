"""What `data show` measures, draws and prints, and the copies that it finds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fednorms.cli import main
from fednorms.cli.data_show import bars
from fednorms.core.errors import BadInput
from fednorms.data import Federation, Preprocessing, Site, Split, from_arrays
from fednorms.data.duplicates import duplicates
from fednorms.data.show import picture, view


def site(name, y, level=0.5, **more):
    x = torch.full((len(y), 1, 4, 4), float(level))
    x[:, :, ::2] += 0.1  # gives some deviation
    return Site(name, name, Split(x, torch.tensor(y)), **more)


def made(*sites, classes=2):
    return Federation("made", sites, [f"c{i}" for i in range(classes)], Preprocessing())


def test_label_shift_is_the_distance_from_the_pooled_labels():
    assert view(made(site("a", [0, 1]), site("b", [0, 1, 0, 1]))).label_shift == 0
    apart = view(made(site("a", [0] * 4), site("b", [1] * 4)))
    assert apart.label_shift == 0.5
    uneven = view(made(site("a", [0, 0, 0, 1]), site("b", [1] * 4)))
    pooled = np.array([3, 5]) / 8
    by_hand = [np.abs(np.array(p) - pooled).sum() / 2 for p in ([0.75, 0.25], [0.0, 1.0])]
    assert [s.label_shift for s in uneven.sites] == pytest.approx(by_hand)
    assert uneven.label_shift == pytest.approx(np.mean(by_hand))


def test_feature_shift_is_in_pooled_deviations():
    assert view(made(site("a", [0, 1], 0.2), site("b", [0, 1], 0.2))).feature_shift == pytest.approx(0, abs=1e-6)
    found = view(made(site("a", [0, 1], 0.2), site("b", [0, 1], 0.6)))
    pixels = np.array([0.2, 0.3, 0.6, 0.7])
    std = pixels.std()
    expected = np.sqrt((0.25 - pixels.mean()) ** 2 + (0.05 - std) ** 2) / std
    assert found.sites[0].feature_shift == pytest.approx(expected, rel=1e-5)
    assert found.sites[0].mean == pytest.approx((0.25,), rel=1e-5)


def test_sizes_and_unseen_sites():
    tested = Site("z", "z", test=site("z", [1, 1]).train)
    found = view(made(site("a", [0, 1]), site("b", [0, 1] * 3), tested))
    assert found.size_ratio == 3
    assert [(s.name, s.train, s.test) for s in found.sites] == [("a", 2, 0), ("b", 6, 0), ("z", 0, 2)]
    assert found.label_shift == 0  # the unseen site does not count


def test_the_picture_shows_every_site(tmp_path):
    federation = made(*(site(f"s{i}", [0, 1], i / 10) for i in range(5)))
    file = picture(federation, tmp_path / "new" / "p.png", images=3)
    with Image.open(file) as image:
        assert image.format == "PNG"
        colours = np.asarray(image.convert("L"))
    assert min(colours.shape) > 200
    with pytest.raises(BadInput, match="PNG"):
        picture(federation, tmp_path / "p.jpg")


def test_the_command(tmp_path, capsys):
    file = tmp_path / "p.png"
    rule = "dirichlet(beta=0.1, clients=30)"
    assert main(["data", "show", "digits-shift", "--partition", rule, "--out", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["sites"]) == 30
    assert found["label_shift"] > 0.3
    assert file.is_file()
    assert main(["data", "show", "digits-shift"]) == 0
    out = capsys.readouterr().out
    assert "feature shift" in out
    assert "poster" in out
    assert main(["data", "show", "digits-shift", "--partition", "dirichlet(clients=0)"]) == 2
    assert "clients must be an integer >= 1" in capsys.readouterr().err


def test_bars_share_a_line():
    assert len(bars(range(345))) <= 40
    assert bars([0, 0]) == "  "


def test_copies_are_counted_against_a_plain_search(capsys):
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (30, 3, 5, 5), generator=generator, dtype=torch.uint8)
    label = torch.arange(30) % 3

    def some(seed, n):
        rows = torch.randint(30, (n,), generator=torch.Generator().manual_seed(seed))
        return pool[rows], label[rows]

    data = {k: {"train": some(i, 9), "test": some(i + 9, 7)} for i, k in enumerate("ab")}
    data["b"]["test"][1][0] = (data["b"]["test"][1][0] + 1) % 3  # one wrong label
    fed = from_arrays(data, classes=list("xyz"))
    trained = torch.cat([data[k]["train"][0] for k in "ab"])
    tested = torch.cat([data[k]["test"][0] for k in "ab"])
    known = sum(bool((trained == x).flatten(1).all(1).any()) for x in tested)
    found = duplicates(fed)
    assert found[0].startswith(f"{known} of 14 test images are also trained on")
    assert found[1] == "1 image has two labels"
    assert duplicates(from_arrays({"a": {"train": (pool[:9], label[:9]), "test": (pool[9:], label[9:])}})) == []


def test_oddities_are_printed(capsys, tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "d" / "a" / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (6, 6), (9, 9, 9)).save(folder / "0.png")
    assert main(["data", "show", str(tmp_path / "d")]) == 0
    out = capsys.readouterr().out
    assert "note: 2 of 2 test images are also trained on (first at site a)" in out
    assert "note: 1 image has two labels" in out
