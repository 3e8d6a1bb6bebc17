"""The pages of docs/ say what the code does."""

import doctest
import math
import re
from pathlib import Path

import pytest

from docs import make_commuting_page, make_methods_page, make_privacy_table
from fednorms.core.citations import papers
from fednorms.core.part import REGISTRY
from fednorms.papers.analysis.measures import ANALYSES
from tests.support.pairs import known, order_of, ordered, some

DOCS = Path(make_methods_page.__file__).parent
WALK = DOCS / "add-a-method.md"


def test_the_methods_page_is_current():
    written = make_methods_page.PAGE.read_text(encoding="utf-8")
    assert make_methods_page.page() == written, "run: python docs/make_methods_page.py"


def test_the_table_of_the_privacy_page_is_current():
    text = make_privacy_table.PAGE.read_text(encoding="utf-8")
    assert make_privacy_table.page(text) == text, "run: python docs/make_privacy_table.py"
    failed, tried = doctest.testmod(make_privacy_table)
    assert tried
    assert not failed


def test_the_privacy_page_computes_its_bound():
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \|$", make_privacy_table.PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for epsilon, said in rows:
        assert abs(math.exp(float(epsilon)) - float(said)) < 0.5 * 10 ** -len(said.partition(".")[2]) + 1e-9


def test_the_page_of_analyses_names_all_with_their_figures():
    rows = re.findall(
        r"^\| `([a-z-]+)` \| ([^|]*) \|", (DOCS / "analyses.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(name for name, _ in rows) == sorted(ANALYSES)
    for name, figures in rows:
        papers = {"FedFN", "GReg", "FedWon", "FedNN"}
        assert {p for p in papers if p in figures} == {p for p in papers if p in ANALYSES[name].figures}


def test_the_example_of_an_analysis_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / "analyses.md").read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(code, names)
    assert [t for t, _ in names["found"].series["F seen - global"]] == [1, 5, 9]


# -- which pairs commute ------------------------------------------------------------------------------------------
SAID = make_commuting_page.read(make_commuting_page.PAGE.read_text(encoding="utf-8"))
LISTED = [pair for pair, order in SAID.items() if order != "refused"]
OTHERS = [pair for pair in ordered() if pair not in SAID and pair[0] != pair[1]]


def test_the_page_of_commuting_pairs_has_tried_every_method():
    text = make_commuting_page.PAGE.read_text(encoding="utf-8")
    tried = re.search(r"^Tried: (.*)\.$", text, re.MULTILINE)[1].split(", ")
    assert tried == known(), "run: PYTHONPATH=. python docs/make_commuting_page.py"
    assert {name for pair in SAID for name in pair} <= set(known())


@pytest.mark.parametrize(("a", "b"), [*some(LISTED, 15), *some(OTHERS, 25), *some(list(SAID), 10)])
def test_a_pair_commutes_or_not_as_the_page_says(a, b):
    assert order_of(a, b) == SAID.get((a, b), "either")


def test_a_page_can_be_read_back():
    found = {
        ("fedbn", "gn"): "refused",
        ("agc", "scaffold"): "matters",
        ("fednorm", "gn"): "first",
        ("a", "b"): "either",
    }
    said = make_commuting_page.read(make_commuting_page.page(found))
    assert all(said.get(pair, "either") == order for pair, order in found.items())
    assert said["gn", "fednorm"] == "second"
    assert said["gn", "fedbn"] == "refused"


@pytest.mark.slow
def test_the_page_of_commuting_pairs_is_current():
    page = make_commuting_page.page(make_commuting_page.orders())
    assert page == make_commuting_page.PAGE.read_text(encoding="utf-8")


# -- adding a method ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "page", [WALK, pytest.param(DOCS / "training.md", marks=pytest.mark.slow)], ids=lambda p: p.name
)
def test_the_code_of_a_page_runs(page):
    before = dict(REGISTRY)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    try:
        failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=flags, encoding="utf-8")
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)
    assert tried
    assert not failed


def test_the_new_method_takes_less_than_15_lines():
    examples = doctest.DocTestParser().get_examples(WALK.read_text(encoding="utf-8"))
    made = next(e.source for e in examples if "@fn.part(" in e.source)
    assert len(made.strip().splitlines()) < 15


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_links_between_pages_work(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_method_in_contributing_names_its_paper_as_the_others_do():
    page = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [paper] = papers(page.partition('class FedNesterov(Part):\n    """')[2].partition('"""')[0])
    assert paper.short
