"""Image files from strangers: only six formats, whatever the name says, and no image that fills the memory."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from fednorms import cli
from fednorms.core.errors import BadInput
from fednorms.data import from_folders
from fednorms.data.folders import decode
from fednorms.runs.recipe import Recipe

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def stored(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((5, 6, 3), 9, np.uint8)).save(out, kind)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have this many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("content", [EPS, *map(stored, ("PPM", "ICO", "TGA", "PCX", "PDF"))])
def test_other_formats_are_refused_whatever_the_name(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.png.*it is not a PNG, JPEG, BMP, TIFF, WebP or GIF image"):
        decode.read_image(tmp_path / "a.png", (3, 5, 6))


@pytest.mark.parametrize("kind", decode.FORMATS)
def test_the_content_decides_not_the_name(tmp_path, kind):
    (tmp_path / "a.png").write_bytes(stored(kind))
    assert (decode.read_image(tmp_path / "a.png", (3, 5, 6)).float() - 9).abs().max() <= 2


@pytest.mark.parametrize("size", [(8193, 8192), (13_000, 13_000), (2**31 - 1, 1), (10**5, 10**5)])
def test_a_decompression_bomb_is_an_error_before_it_is_decoded(tmp_path, monkeypatch, size):
    (tmp_path / "a.png").write_bytes(bomb(*size))
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(BadInput, match=r"a\.png.*(at most 67,108,864 are read; resize|exceeds limit)"):
        decode.read_image(tmp_path / "a.png", (3, 8, 8))


def test_a_folder_names_the_hostile_files(tmp_path):
    for i in range(10):
        (tmp_path / "d" / "a" / "cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / "a" / "cat" / f"{i}.png").write_bytes(stored("PNG"))
    (tmp_path / "d" / "a" / "cat" / "eps.png").write_bytes(EPS)
    (tmp_path / "d" / "a" / "cat" / "huge.png").write_bytes(bomb(9000, 9000))
    with pytest.raises(BadInput, match=r'(?s)eps\.png" cannot be read.*huge\.png" cannot be read: it has 9000 x 9000'):
        from_folders(tmp_path / "d", size=8, cache=tmp_path / "cache")


@pytest.fixture
def latin(tmp_path):
    """Folders whose names, in order site, class and file, may be bytes of Latin-1."""

    def make(site: bytes = b"a", label: bytes = b"cat", file: bytes = b"x"):
        for name in (b"dog", label):
            folder = os.path.join(os.fsencode(tmp_path / "d"), site, name)
            try:
                os.makedirs(folder)
            except OSError:
                pytest.skip("this file system has UTF-8 names only")
            for i in range(10):
                with open(os.path.join(folder, b"%s%d.png" % (file, i)), "wb") as out:
                    out.write(stored("PNG"))
        return tmp_path / "d"

    return make


@pytest.mark.parametrize("names", [{"site": b"s\xfcd"}, {"label": b"caf\xe9"}])
def test_a_site_or_class_whose_name_is_not_utf_8_is_refused(latin, tmp_path, names):
    with pytest.raises(BadInput, match=r'"(s\\udcfcd|caf\\udce9)" is not UTF-8\. Rename it\.') as caught:
        from_folders(latin(**names), cache=tmp_path / "cache")
    str(caught.value).encode()


def test_a_file_name_that_is_not_utf_8_is_read_and_can_be_printed(latin, tmp_path, monkeypatch):
    root = latin(file=b"caf\xe9")
    assert from_folders(root, cache=tmp_path / "cache").shape == (3, 5, 6)
    name = next(os.listdir(p) for p in [root / "a" / "dog"])[0]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(cli, "_dispatch", lambda _: print(json.dumps(name, ensure_ascii=False)) or 0)
    assert cli.main(["predict"]) == 0
    out.flush()
    assert json.loads(out.buffer.getvalue()) == name


def test_a_recipe_cannot_name_a_folder_that_is_not_utf_8():
    with pytest.raises(BadInput, match=r"federation= must be UTF-8, got \"folder:caf\\udce9\""):
        Recipe.make({"federation": "folder:caf\udce9"})
