"""`fednorms data check` and `fednorms data pack`."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

from fednorms.cli import main
from fednorms.cli.data_check import published
from fednorms.data.readers import READERS, pacs_vlcs
from fednorms.data.rules import rule
from fednorms.transforms import CHAINS
from tests.support.layouts import class_folders, gradient


def test_check_names_the_data_set_and_what_is_missing(tmp_path, capsys):
    root = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 10)
    (root / "photo" / "dog" / "000.png").write_bytes(b"")
    assert main(["data", "check", str(root)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "pacs (flat)" in out
    assert "7 classes (dog, elephant" in out
    assert "FedNN: floor(0.1 n)" in out
    assert "art_painting: 369 of 379 images of dog missing (10 found)" in out
    assert "1 file cannot be read: photo/dog/000.png (the file is empty)" in out
    assert main(["data", "check", str(root), "--json", "--protocol", "greg"]) == 1
    report = json.loads(capsys.readouterr().out)
    first = report["sites"][0]
    assert (first["name"], first["train"], first["val"], first["test"]) == ("art_painting", 24, 9, 21)
    assert set(report["protocols"]) == set(pacs_vlcs.PACS_PROTOCOLS)
    assert "as in its papers: augmentation flip_rotate" in report["facts"]
    assert set(report["tables"]) <= set(report["protocols"])


def test_check_names_the_tables_that_can_be_reproduced():
    for reader in READERS.values():
        serves = published(reader)
        assert set(serves) <= set(reader.protocols), "a table asks for a division that the reader does not have"
        for names in serves.values():
            assert len(set(names)) == len(names)
    assert "fedwon-table-1" in published(READERS["digits-five"])["fedwon"]
    assert published(READERS["npz"]) == {}


def test_an_option_is_known_by_its_name_in_other_commands(tmp_path, capsys):
    root = class_folders(tmp_path / "mine", ("oslo", "bonn"), ("cat", "dog"), 10)

    def packed(*options):
        out = tmp_path / "mine.fnpack"
        assert main(["data", "pack", str(root), str(out), *options]) == 0
        return out.read_bytes()

    assert packed("--data-seed", "3") == packed("--seed", "3") != packed()
    assert main(["data", "check", str(root), "--data-seed", "3"]) in (0, 1)
    for option in ("--incomplete", "--no-complete"):
        assert main(["reproduce", "fedwon-table-3", "--dry-run", "--out", str(tmp_path / "out"), option]) == 0


def test_list_shows_partitions_and_transforms(capsys):
    assert main(["list", "partitions", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["partitions"]}
    assert "beta=0.3" in rows["dirichlet"]["options"]
    for name in rows:
        if name != "file:PATH":
            assert str(rule(name)).startswith(name), "what is listed can be used"
    assert main(["list", "transforms"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in CHAINS)
    assert "rotate up to 30 degrees" in said


def test_check_of_custom_folders_and_arrays(tmp_path, capsys):
    class_folders(tmp_path / "mine", ("oslo", "bonn"), ("cat", "dog"), 10)
    assert main(["data", "check", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert "custom images" in out
    assert "oslo" in out
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "a.npz", x=gradient(20, (8, 8)), y=np.arange(20) % 2)
    assert main(["data", "check", str(tmp_path / "npz")]) == 0
    assert "npz (1 .npz files)" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["data", "check", str(tmp_path / "empty")]) == 2
    assert "is not a data set" in capsys.readouterr().err


def test_pack_then_check_then_damage(tmp_path, capsys):
    root = class_folders(tmp_path / "mine", ("oslo", "bonn"), ("cat", "dog"), 10)
    out = tmp_path / "mine.fnpack"
    assert main(["data", "pack", str(root), str(out), "--size", "8", "--quality", "80"]) == 0
    assert "2 sites; use it as pack:" in capsys.readouterr().out
    assert main(["data", "check", str(out)]) == 1, "at this quality, dark images become equal"
    said = capsys.readouterr().out
    assert "images stored as jpeg of quality 80" in said
    assert "height x width 8x8" in said
    data = bytearray(out.read_bytes())
    data[100] ^= 1
    out.write_bytes(bytes(data))
    assert main(["data", "check", str(out)]) == 2
    assert "its data are damaged" in capsys.readouterr().err
    assert main(["data", "pack", str(root), str(tmp_path)]) == 2
    assert "is a folder. Give the file to write" in capsys.readouterr().err


def test_a_pack_of_folders_keeps_patients_together(tmp_path, capsys):
    from fednorms.data.packed import unpacked

    root = tmp_path / "mine"
    for site in ("oslo", "bonn"):
        for label in ("cat", "dog"):
            (root / site / label).mkdir(parents=True)
            for i in range(12):  # a patient's four images have one color: its red value is the number
                Image.new("RGB", (4, 4), (10 * (i // 4), 0, 0)).save(root / site / label / f"p{i // 4}_{i}.png")
    command = ["data", "pack", str(root), str(tmp_path / "p.fnpack"), "--codec", "raw"]
    assert main([*command, "--group", "p([0-9]+)", "--test", "0.3", "--val", "0"]) == 0
    for site in unpacked(tmp_path / "p.fnpack").sites:
        reds = {part: set(split.x[:][:, 0, 0, 0].tolist()) for part, split in site.splits.items()}
        assert set(reds) == {"train", "test"}
        assert reds["train"].isdisjoint(reds["test"])
    assert main([*command, "--group", "("]) == 2
    assert "not a regular expression" in capsys.readouterr().err
    assert main([*command, "--channels", "1"]) == 0
    assert unpacked(tmp_path / "p.fnpack").shape == (1, 4, 4)
    assert main(["data", "pack", "digits-shift", str(tmp_path / "d.fnpack"), "--channels", "1"]) == 2
    assert "for folders of images only" in capsys.readouterr().err


def test_pack_of_a_recognized_data_set_keeps_the_protocol(tmp_path, capsys):
    from fednorms.data.packed import unpacked

    root = class_folders(tmp_path / "PACS", pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 4)
    options = ["--protocol", "greg", "--size", "4"]
    assert main(["data", "pack", str(root), str(tmp_path / "p.fnpack"), *options]) == 2
    assert "not as published" in capsys.readouterr().err
    assert main(["data", "pack", str(root), str(tmp_path / "p.fnpack"), *options, "--complete", "False"]) == 0
    packed = unpacked(tmp_path / "p.fnpack")
    assert packed.source["packed_from"]["protocol"] == "greg"
    assert [len(s.train) for s in packed.sites] == [9, 9, 9, 9]


def test_the_command_group(capsys):
    assert main(["data", "--help"]) == 0
    assert "check" in capsys.readouterr().out
    assert main(["data"]) == 2
    assert main(["data", "chek"]) == 2
    assert 'did you mean "check"' in capsys.readouterr().err


def test_images_of_several_sizes_are_shown_at_one_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for site, (width, height) in {"bern": (8, 6), "graz": (10, 12)}.items():
        for label in ("cat", "dog"):
            (tmp_path / "pets" / site / label).mkdir(parents=True)
            for i in range(5):
                Image.new("RGB", (width + i % 2, height), (i * 40, 0, 0)).save(
                    tmp_path / "pets" / site / label / f"{i}.png"
                )
    picture = tmp_path / "pets.png"
    assert main(["data", "show", str(tmp_path / "pets"), "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "6x8 to 6x9" in out
    assert "12x10 to 12x11" in out
    assert "--size 10" in out  # the median of the shorter sides, 6 and 10
    with Image.open(picture) as drawn:
        assert drawn.width > 100
    assert main(["data", "show", str(tmp_path / "pets"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pixels"]["bern"] == {"6x8": 6, "6x9": 4}
    assert main(["data", "show", str(tmp_path / "pets"), "--size", "8"]) == 0
    assert "pixels" not in capsys.readouterr().out.splitlines()[1]
    assert main(["run", "--federation", str(tmp_path / "pets"), "--out", str(tmp_path / "run")]) == 2
    assert "resize them all with --size 6." in capsys.readouterr().err


def test_show_of_a_published_data_set_that_is_no_folder_of_sites_names_it(tmp_path, capsys):
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / f"{name}.bin").write_bytes(b"")
    assert main(["data", "show", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f'It looks like cifar-10: use federation "cifar-10" with --root "{tmp_path}"' in said
