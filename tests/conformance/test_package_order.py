"""The order of packages: a file may import from its own package and from those below it, never from one above."""

import ast
from pathlib import Path

import pytest

import fednorms

SOURCE = Path(fednorms.__file__).parent
# Lowest first. Files directly in the package (its public list, `python -m fednorms`) are above everything,
# except `_version.py`, which imports nothing.
ORDER = (
    "_version",
    "transforms",
    "core",
    "layers",
    "models",
    "methods",
    "data",
    "evaluation",
    "engines",
    "runs",
    "explain",
    "papers",
    "advice",
    "reports",
    "flower",
    "cli",
)
FILES = sorted(SOURCE.rglob("*.py"))


def package(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in ORDER else ""


def level(module: str) -> int:
    return ORDER.index(package(module)) if package(module) else len(ORDER)


def module_of(path: Path) -> str:
    return ".".join(("fednorms", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def imported(tree: ast.Module):
    """Every module of ours that a file imports, late imports and literals of import_module included."""
    types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in types_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield from ([f"fednorms.{a.name}" for a in node.names] if node.module == "fednorms" else [node.module])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for argument in node.args[:1]:
                text = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
                if isinstance(text, ast.Constant):
                    yield str(text.value).rstrip(".")


def upward(path: Path, tree: ast.Module) -> list[str]:
    here = level(module_of(path))
    ours = [m for m in imported(tree) if m == "fednorms" or m.startswith("fednorms.")]
    return [m for m in ours if level(m) > here]


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_no_import_points_upwards(path):
    assert upward(path, ast.parse(path.read_text(encoding="utf-8"))) == []


def test_every_package_has_its_place():
    there = {p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert there | {"_version"} == set(ORDER)
    assert {p.stem for p in SOURCE.glob("*.py")} == {"__init__", "__main__", "_moved", "_version"}


@pytest.mark.parametrize(
    "line",
    [
        "from fednorms.runs.driver import run",
        "import fednorms.runs.driver",
        "def f():\n    from fednorms.engines import loop",
        "import_module('fednorms.cli.run')",
        "importlib.import_module(f'fednorms.methods.{name}')",
        "from fednorms import run",
        "import fednorms",
    ],
)
def test_an_upward_import_is_found(line):
    assert upward(SOURCE / "core" / "tree.py", ast.parse(line))
    assert not upward(SOURCE / "core" / "tree.py", ast.parse("from fednorms.core import noise\nimport torch"))
