"""Examples: each runs, and imports only what is public."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

import fednorms
from examples.demo import narrow
from fednorms.core import norms

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "demo.py")  # tests/cli/test_demo.py


def imported(path):
    """The modules that a file imports, and the names it takes from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_only_public_names(path):
    ours = {(module, name) for module, name in imported(path) if module.partition(".")[0] == "fednorms"}
    public = {("fednorms", name) for name in ("", *fednorms.__all__)}
    public |= {("fednorms.flower", name) for name in ("client_app", "server_app")}
    assert ours
    assert ours <= public


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_runs(path, monkeypatch, tmp_path, capsys, parts_as_before):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(norms, "_NORMS", dict(norms._NORMS))
    monkeypatch.setattr(sys, "argv", [str(path), "1"])
    runpy.run_path(str(path), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


def test_the_table_of_the_demo_fits_any_terminal():
    recipe = fednorms.Recipe(data={"size": 8}, training={"steps": 1}, rounds=1)
    comparison = fednorms.compare(["fedavg", "gn"], seeds=2, recipe=recipe)
    header, *rest = narrow(comparison)
    assert header.split() == comparison.columns
    for line, row in zip(rest, comparison.rows, strict=False):
        shown = [float(cell.rstrip("*")) for cell in line.split()[1:]]
        assert shown == [round(100 * row.entries[column].mean, 1) for column in comparison.columns]
    lines = "\n".join([header, *rest]).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("*") for line in rest[:2]) >= len(comparison.columns)


def test_the_readme_lists_every_example():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*"):
        if path.suffix == ".py" or (path / "pyproject.toml").exists():
            assert f"`{path.name}" in text
