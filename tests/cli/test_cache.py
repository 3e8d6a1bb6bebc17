"""`fednorms cache`: list and clear the cache of decoded images."""

from __future__ import annotations

import json

import pytest

from fednorms.cli import main
from fednorms.data import from_folders
from tests.support.layouts import class_folders


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDNORMS_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        class_folders(tmp_path / name, ("oslo", "bern"), ("cat", "dog"), 3)
        from_folders(tmp_path / name, size=8)
    return tmp_path / "cache"


def listed(capsys, *options):
    assert main(["cache", "list", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_says_what_was_decoded_and_how_much_room_it_takes(cache, tmp_path, capsys):
    main(["data", "check", str(tmp_path / "one"), "--json"])
    capsys.readouterr()
    found = listed(capsys)
    assert found["cache"] == str(cache)
    assert found["bytes"] == sum(path.stat().st_size for path in cache.iterdir())
    images = [entry for entry in found["entries"] if entry["what"] == "3x8x8"]
    assert sorted(entry["made_from"] for entry in images) == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert {entry["images"] for entry in found["entries"]} == {12}
    assert len(listed(capsys, "--folder", str(tmp_path / "two"))["entries"]) == 1
    assert main(["cache", "list"]) == 0
    assert "3 entries" in capsys.readouterr().out


def test_clear_removes_only_what_the_library_wrote(cache, tmp_path, capsys):
    (cache / "notes.txt").write_text("mine")
    (cache / "array.npy").write_bytes(b"mine")
    assert main(["cache", "clear", "--folder", str(tmp_path / "one")]) == 0
    assert "Removed 1 entry" in capsys.readouterr().out
    assert [entry["made_from"] for entry in listed(capsys)["entries"]] == [str(tmp_path / "two")]
    assert main(["cache", "clear"]) == 0
    assert sorted(path.name for path in cache.iterdir()) == ["array.npy", "notes.txt"]
    assert from_folders(tmp_path / "one", size=8).fingerprint()
    assert (tmp_path / "one" / "oslo" / "cat" / "000.png").is_file()


def test_nothing_is_kept_if_the_cache_is_off(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDNORMS_CACHE", "off")
    before = sorted(cache.iterdir())
    from_folders(tmp_path / "one", size=4)
    assert main(["data", "check", str(tmp_path / "two"), "--json"]) in (0, 1)
    assert sorted(cache.iterdir()) == before
    assert main(["cache", "list"]) == 2
    assert "FEDNORMS_CACHE" in capsys.readouterr().err


def test_an_empty_cache_and_bad_calls(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDNORMS_CACHE", str(tmp_path / "none"))
    assert listed(capsys)["entries"] == []
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "burn"]) == 2
    assert main(["cache"]) == 2
