"""The commands and programs of docs/hand-over.md work as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from fednorms.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "hand-over.md"


@pytest.mark.slow
def test_every_command_and_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "IMAGES").mkdir()
    Image.new("RGB", (20, 20), (200, 30, 90)).save(tmp_path / "IMAGES" / "image.png")
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^\$ fednorms (.*)$", text, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        assert main(shlex.split(command)) == 0, command
    capsys.readouterr()
    folder = tmp_path / "models" / "foggy-graphs"
    Image.open(tmp_path / "IMAGES" / "image.png").save(folder / "image.png")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, object] = {}
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 3
    for code in programs:
        exec(code, names)
    said = capsys.readouterr().out.strip()
    assert said in names["CLASSES"]
    monkeypatch.chdir(tmp_path)
    main(["predict", "models/foggy", "IMAGES"])
    assert f" {said} " in capsys.readouterr().out


def test_the_page_names_every_layer_that_stays():
    """Its last row of folded layers is what `fold` leaves."""
    from tests.runs.use.test_handover import KEPT

    row = re.search(r"^\| (`agn`.*?) \| as they are, in `model.pt2`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(KEPT) <= set(re.findall(r"`(\w+)`", row[1]))
