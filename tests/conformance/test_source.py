"""What the source of every registered part must look like."""

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

import fednorms.layers
from fednorms import methods
from fednorms.core.citations import papers
from fednorms.core.part import HOOKS, REGISTRY, SUMS, Part
from fednorms.methods.registry import load_all

load_all()
# Only the library's own parts: another test may have registered a custom one.
PARTS = {n: c for n, c in sorted(REGISTRY.items()) if c.__module__.startswith("fednorms.methods.")}
FILES = sorted(p for p in Path(methods.__path__[0]).glob("*.py") if p.stem not in ("__init__", "registry"))
ALLOWED = (
    "fednorms.core.part",
    "fednorms.core.tree",
    "fednorms.core.views",
    "fednorms.transforms",
    "fednorms.layers",
    "fednorms.core.errors",
    "fednorms.core.clustering",
    "fednorms.core.moments",
    "fednorms.core.norms",
    "fednorms.core.simplex",
    "fednorms.core.surgery",
)
ALLOWED_AS_TYPES = (*ALLOWED, "fednorms.data", "fednorms.core.net", "fednorms.core.method", "fednorms.core.training")
OUTSIDE = {"torch", "typing_extensions", "math", "dataclasses", "typing", "collections", "__future__"}


def within(name, allowed):
    return any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("cls", PARTS.values(), ids=PARTS)
def test_every_hook_is_declared_and_every_helper_is_private(cls):
    overridden = set()
    for name, value in vars(cls).items():
        if not inspect.isfunction(value) or name.startswith("__"):
            continue
        if name in HOOKS:
            overridden.add(name)
            assert getattr(value, "__override__", False), f"{cls.__name__}.{name} lacks @override"
        else:
            assert name.startswith("_"), f"{cls.__name__}.{name} is a helper: underscore it"
    assert overridden, f"{cls.__name__} implements no hook"


@pytest.mark.parametrize("cls", PARTS.values(), ids=PARTS)
def test_hooks_have_the_parameters_of_the_base(cls):
    for name in HOOKS:
        ours, base = getattr(cls, name), getattr(Part, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(base).parameters)


@pytest.mark.parametrize("cls", PARTS.values(), ids=PARTS)
def test_a_part_is_a_frozen_dataclass_of_ranged_scalars(cls):
    assert cls.__dataclass_params__.frozen
    assert cls.__base__ is Part
    for f in dataclasses.fields(cls):
        assert type(f.default) in (int, float, bool, str, type(None))  # None: a number from the rest of the recipe
        if type(f.default) in (int, float, type(None)):
            assert any(f.metadata.get(k) is not None for k in ("at_least", "above", "at_most")), f.name
        if type(f.default) is str:
            assert f.default in (f.metadata["choices"] or ("",))  # one of a few words, or names of modules
    assert cls() == cls()


@pytest.mark.parametrize("made", [*PARTS.values(), *SUMS.values()], ids=[*PARTS, *SUMS])
def test_the_docstring_has_paper_formula_and_example(made):
    text = made.__doc__
    assert ">>>" in text
    first = text.strip().splitlines()[0]
    assert len(text.split()) > 15
    assert first[0].isupper()
    if inspect.isclass(made):
        assert made.paper


@pytest.mark.parametrize("made", [*PARTS.values(), *SUMS.values()], ids=[*PARTS, *SUMS])
def test_every_method_names_its_paper_with_title_and_link(made):
    text = " ".join(made.__doc__.split())
    found = papers(text)
    assert len(found) == text.count("Paper: ") - text.count("Paper: none.")
    assert bool(found) != ("Paper: none." in text)  # only baselines have none
    for paper in found:
        assert paper.link or "No link found" in text
        assert len(paper.title.split()) >= 2
        assert re.fullmatch(r"(19|20)\d\d", paper.venue.split()[-1])
    if found and inspect.isclass(made):
        assert found[0].authors.split()[0].rstrip(",") in made.paper


LAYERS = sorted(Path(fednorms.layers.__file__).parent.glob("*.py"))
UNPUBLISHED = {"__init__", "convolution", "folding", "given_norm", "replacement"}


@pytest.mark.parametrize("path", LAYERS, ids=[p.stem for p in LAYERS])
def test_every_layer_file_names_its_paper(path):
    found = papers(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
    assert bool(found) != (path.stem in UNPUBLISHED)
    assert all(paper.link for paper in found)


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_method_files_import_only_what_they_may(path):
    tree = ast.parse(path.read_text())
    typing_only = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typing_only |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            modules = [node.module]
        else:
            continue
        for module in modules:
            if module.split(".")[0] == "fednorms":
                assert within(module, ALLOWED_AS_TYPES if id(node) in typing_only else ALLOWED), module
            else:
                assert module.split(".")[0] in OUTSIDE or module in sys.stdlib_module_names, module


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_method_files_never_decide_by_the_letters_of_a_name(path):
    tree = ast.parse(path.read_text())
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert "bn" not in strings
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in ("endswith", "startswith", "find"), ast.unparse(node)
