"""Every table in recipes/: strict format, methods that fit their models, columns that the data have, one round each."""

from __future__ import annotations

import hashlib
import re
import tomllib
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean

import pytest

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.data.readers import READERS
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.papers.analysis.measures import ANALYSES
from fednorms.papers.analysis.picture import png
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.tables.catalog import file_of, home, known
from fednorms.papers.tables.plan import pairs, recipe_for
from fednorms.papers.tables.record import plain, record, same_run
from fednorms.papers.tables.search import Search
from fednorms.papers.tables.sources import check_columns, look, needs
from fednorms.papers.tables.store import ResultStore
from fednorms.papers.tables.table import Table
from fednorms.runs.cells import Outcome
from fednorms.runs.driver import execute
from tests.support.data_sets import MAKERS

NAMES = known()
FEW = 10  # tables with a row that the quick tests train


def number(text):
    """A number from a name that never changes, unlike Python's hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def sample(names, most):
    return sorted(names, key=number)[:most]


@cache
def read(name):
    return Table.read(file_of(name))


@lru_cache(maxsize=1)
def recipes():
    """The recipe of every row in every setting of every table."""
    return [(read(n), s, r, recipe_for(read(n), s, r, 0, {})) for n in NAMES for s, r in pairs(read(n))]


def test_there_are_tables_of_all_papers():
    assert {read(name).paper for name in NAMES} >= {"FedNN", "GReg", "FedWon", "FedFN"}
    for name in NAMES:
        table = read(name)
        words = f"{table.paper} {table.label}".lower().replace(" ", "-").replace(".", "")
        assert name == words or table.paper == "fednorms", (name, words)
        assert table.kind == ("figure" if "figure" in name else "table") or table.paper == "fednorms", name


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_complete(name):
    table = read(name)  # every recipe is checked here
    assert table.title
    for setting in table.settings:
        assert any(row.runs_in(setting) for row in table.rows), f"{setting.name} has no row"
        federation = str(setting.recipe.get("federation", table.recipe.get("federation", "")))
        assert federation, f"{setting.name} names no federation"
        assert needs(setting, table) in (*MAKERS, ""), "tests/support/data_sets.py has no tiny copy"
        protocol = setting.recipe.get("data", {}).get("protocol", table.recipe.get("data", {}).get("protocol", ""))
        if needs(setting, table):
            assert protocol in READERS[federation].protocols, f"{setting.name}: {federation} has no {protocol!r}"
        modes = {s.mode for s in setting.selectors.values() if s.mode}
        tested = {m for row in table.rows if row.runs_in(setting) for m in _tested(table, setting, row)}
        assert modes <= tested, f"{setting.name}: no row is tested as {modes - tested}"
    for row in table.rows:
        for setting in table.settings:
            for column, printed in row.published.get(setting.name, {}).items():
                if not setting.selectors[column].is_cost:
                    assert printed.failed or 0 <= printed.mean <= 100, f"{row.name}, {column}: per cent"


@pytest.mark.parametrize("name", [n for n in NAMES if any(row.averages for row in read(n).rows)])
def test_published_averages_are_those_of_the_published_columns(name):
    table = read(name)
    named = {s.name: s for s in table.settings}
    checked = 0
    for row in table.rows:
        for average, printed in row.averages.items():
            of = {s: c for s, c in table.averages[average].items() if row.runs_in(named[s])}
            cells = [row.published[s][c].mean for s, c in of.items() if c in row.published.get(s, {})]
            if len(cells) == len(of):  # tables leave out cells that contradict the published average
                assert printed.mean == pytest.approx(fmean(cells), abs=0.06), row.name
                checked += 1
    assert checked > len(table.rows) / 2


def _tested(table, setting, row):
    given = recipe_for(table, setting, row, 0, {}).evaluate
    always = ("adapted", "unseen", "global", "personal") if "auto" in given else ()
    return {*given, *(mode.partition("/")[0] for mode in given), *always}


def test_the_same_recipe_stays_the_same_run():
    for _, _, _, recipe in recipes()[::50]:
        assert same_run(plain(recipe), recipe)


def test_all_runs_of_fedwons_table_4_are_runs_of_its_table_18():
    there = [recipe_for(read("fedwon-table-18"), s, r, 0, {}) for s, r in pairs(read("fedwon-table-18"))]
    for setting, row in pairs(read("fedwon-table-4")):
        mine = recipe_for(read("fedwon-table-4"), setting, row, 0, {})
        assert any(same_run(plain(mine), other) for other in there if other.method == mine.method), (setting, row)


def _sizes(model):
    """The smallest images that a model takes."""
    return {"alexnet": 64, "alexnet-fedbn": 64, "digits-cnn": 28, "digits-cnn-fedbn": 28, "timm:levit_128s": 224}.get(
        model, 32
    )


@lru_cache(maxsize=2)
def _model(name):
    return build(name, classes=10, channels=3, size=_sizes(name), seed=0)


def _combinations():
    found = {}
    for table, setting, row, recipe in recipes():
        found.setdefault((recipe.model, str(recipe.whole_method())), f"{table.name}, {setting.name}, {row.name}")
    return [(model, method, where) for (model, method), where in sorted(found.items())]


def _fit(combinations):
    problems = []
    for model, text, where in combinations:
        try:
            Net(_model(model), method(text), name=model)
        except BadInput as error:
            problems.append(f"{where}: {text} on {model}: {error}")
    assert not problems, "\n".join(problems)


def test_a_sample_of_the_methods_fits_their_models():
    cheap = [c for c in _combinations() if c[0] in ("lenet", "digits-cnn", "mobilenet-v1", "torchvision:resnet18")]
    _fit(sorted(sorted(cheap, key=lambda c: number(c[0] + c[1]))[:30]))


@pytest.mark.slow
def test_every_method_fits_its_model():
    pytest.importorskip("timm")
    _fit(_combinations())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A function that makes a tiny copy of a data set once and returns its folder."""
    root = tmp_path_factory.mktemp("data")

    def make(name):
        if name and not (root / name).exists():
            MAKERS[name](root / name)
        return str(root / name) if name else ""

    return make


def shrunk(recipe, root):
    """The same run in small: tiny data, a small network, one round of one epoch, few clients."""
    data = recipe.data.model_copy(
        update={
            "root": root,
            "complete": False,
            "size": 16,
            "partition": re.sub(r"clients=\d+", "clients=20", recipe.data.partition),
        }
    )
    training = {**vars(recipe.training), "epochs": 1, "batch_size": min(recipe.training.batch_size, 16)}
    if recipe.training.steps:
        training["steps"] = 2
    few = "all" if recipe.participation == "all" else "fixed:2"
    small = {"data": data.model_dump(), "training": training, "rounds": 1, "model": "cnn-small", "pretrained": False}
    return type(recipe).make(recipe.model_dump() | small | {"weights": "", "head": [], "participation": few})


def _one_round(name, tiny):
    """A row of the table, chosen by its name, trains one round; its columns show numbers."""
    table = read(name)
    every = sorted(pairs(table), key=lambda pair: number(f"{name} {pair[0].name} {pair[1].name}"))
    setting, row = every[0]
    recipe = recipe_for(table, setting, row, 0, {})
    small = shrunk(recipe, tiny(needs(setting, table)))
    source = look(small)
    assert not check_columns(setting, source)
    outcome = Outcome.of("x", execute(small))
    stored = record(outcome, small, source.sites, curve=setting.keeps_curve, about={"data": source.stored})
    for column, selector in setting.selectors.items():
        if not selector.mode and not selector.needs_curve:
            assert selector.value(stored, table.selection) is not None, f"{name}, {row.name}: {column}"
    if row.search:
        search = Search(table, setting, row, ResultStore(home()))
        tried = shrunk(search.recipe(search.points[0], 0), small.data.root)
        assert look(tried).validated, "a search needs validation images"


@pytest.mark.parametrize("name", sample(NAMES, FEW))
def test_one_row_of_a_few_tables_trains_on_tiny_data(name, tiny):
    _one_round(name, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n not in sample(NAMES, FEW)])
def test_one_row_of_every_table_trains_on_tiny_data(name, tiny):
    _one_round(name, tiny)


ANALYSED = [n for n in NAMES if read(n).analysis]


def _analysed(name, tiny, folder):
    """A row of the figure trains and is analysed, as `reproduce` would do it."""
    table = read(name)
    setting, row = min(pairs(table), key=lambda pair: number(f"{name} {pair[0].name} {pair[1].name}"))
    assert setting.keeps_run or table.analysis == "test-gap"
    small = shrunk(recipe_for(table, setting, row, 0, {}), tiny(needs(setting, table)))
    rounds = 10 if table.analysis == "drift-embedding" else 2
    often = {"rounds": rounds, "checkpoint_every": 1, "keep_checkpoints": "all", "evaluate_every": 1}
    execute(small.model_copy(update=often), out=folder)
    found = ANALYSES[table.analysis].measure(StoredRun(folder))
    assert found.scalars or found.arrays
    assert png(ANALYSES[table.analysis], {"": {row.name: [found]}}, table.title).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sample(ANALYSED, 4))
def test_a_few_figures_are_analysed_on_tiny_data(name, tiny, tmp_path):
    _analysed(name, tiny, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ANALYSED if n not in sample(ANALYSED, 4)])
def test_every_figure_is_analysed_on_tiny_data(name, tiny, tmp_path):
    _analysed(name, tiny, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_column_names_what_the_data_have(name, tiny):
    table = read(name)
    for setting in table.settings:
        row = next(row for row in table.rows if row.runs_in(setting))
        source = look(shrunk(recipe_for(table, setting, row, 0, {}), tiny(needs(setting, table))))
        assert not check_columns(setting, source)


def test_an_installed_package_has_the_reports_and_not_the_stored_runs():
    root = Path(__file__).parents[3]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    patterns = build["targets"]["wheel"]["exclude"]
    files = [p for p in (root / "recipes").rglob("*") if p.is_file()]
    left_out = {p for p in files for pattern in patterns if p.match(pattern.removeprefix("/"))}
    assert left_out == {p for p in files if p.name == "results.json"} != set()
