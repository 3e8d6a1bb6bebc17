"""The pages say what the code does: generated pages are current, and what the README claims holds."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

import fednorms
from docs import (
    griffe_doctests,
    make_api_pages,
    make_cli_page,
    make_data_page,
    make_recipe_page,
    make_results_page,
    make_which_method_page,
)
from fednorms.cli import main, parsing
from fednorms.core.training import Training
from fednorms.data.readers import READERS
from fednorms.methods.registry import load_all, names
from fednorms.papers.tables.catalog import known
from fednorms.runs.recipe import Data

ROOT = Path(make_data_page.__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


MAKERS = (
    griffe_doctests,
    make_api_pages,
    make_cli_page,
    make_data_page,
    make_recipe_page,
    make_results_page,
    make_which_method_page,
)


@pytest.mark.parametrize("module", MAKERS, ids=lambda module: module.__name__)
def test_the_examples_of_the_makers_hold(module):
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert tried
    assert not failed


# -- pages in the repository ----------------------------------------------------------------------------------------
def test_the_page_of_data_sets_is_current():
    page = make_data_page.page()
    assert page == make_data_page.PAGE.read_text(encoding="utf-8"), "run: python docs/make_data_page.py"
    for reader in READERS.values():
        assert f"\n## {reader.name}\n" in page
        assert all(f"`{protocol}`" in page for protocol in reader.protocols)


def test_the_tables_of_results_are_current():
    text = make_results_page.PAGE.read_text(encoding="utf-8")
    assert make_results_page.page(text) == text, "run: python docs/make_results_page.py"


def test_the_page_of_situations_is_current():
    text = make_which_method_page.PAGE.read_text(encoding="utf-8")
    assert make_which_method_page.page(text) == text, "run: python docs/make_which_method_page.py"


def test_the_table_of_situations_has_the_mean_loss_of_the_methods_that_ran_everywhere():
    question = {"always": {"a": 2.0, "b": 0.0}, "advice": 1.0}
    other = {"always": {"b": 3.0}, "advice": 0.0}
    measures = {"label_tv": 0.3, "feature_w2_class": 0.0}
    found = [{"measures": measures, "any": q, "one model": q} for q in (question, other)]
    assert make_which_method_page.row(found, skewed=True, different=False) == [
        "differ",
        "alike",
        "2",
        *["b 1.5", "0.5"] * 2,
    ]


@pytest.mark.parametrize("report", sorted((ROOT / "recipes/results").glob("*/RESULTS.md")), ids=lambda p: p.parent.name)
def test_the_page_of_results_agrees_with_each_report(report):
    """The report was written by `reproduce`, the page by its own command: both count the same cells and pairs."""
    text = report.read_text(encoding="utf-8")
    score = re.search(r"(\d+ of \d+) published cells are within", text)
    orders = [tuple(map(int, found)) for found in re.findall(r"(\d+) of (\d+) pairs as published", text)]
    order = " of ".join(str(sum(column)) for column in zip(*orders, strict=True)) if orders else ""
    row = _results()[report.parent.name]
    assert [row[0], row[2]] == [score[1] if score else "not judged", order]


# -- pages of the site ----------------------------------------------------------------------------------------------
def test_every_public_name_has_a_page():
    text = "".join(make_api_pages.pages().values())
    for name in fednorms.__all__:
        assert len(re.findall(rf"^::: fednorms\.{name}$", text, re.MULTILINE)) == 1, name
    for part in fednorms.methods.__all__:
        assert re.search(rf"^::: fednorms\.methods\.\w+\.{part}$", text, re.MULTILINE), part


def test_every_recipe_key_is_explained():
    page = make_recipe_page.page()
    keys = [*fednorms.Recipe.model_fields, *Data.model_fields, *vars(Training())]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE))
    for key in set(keys) - {"training", "data"}:
        assert rows[key].strip(), key


def test_every_command_and_its_subcommands_are_shown():
    page = make_cli_page.page()
    for command in ("run", "compare", "reproduce", "data check", "deploy init"):
        assert re.search(rf"^#+ fednorms {command}$", page, re.MULTILINE), command
    assert "\x1b" not in page
    assert "--rounds" in page


def test_examples_in_docstrings_become_code():
    text = "Add.\n\nArgs:\n    x: one.\n\n>>> add(1)\n2\n>>> add(2)\n3"
    assert griffe_doctests.fenced(text) == text.replace(">>> add(1)", "```pycon\n>>> add(1)") + "\n```"
    assert griffe_doctests.fenced("No example.") == "No example."


# -- the README -----------------------------------------------------------------------------------------------------
def _results():
    """The rows of the page of results, by table: cells, pairs, runs and what has not run."""
    rows = re.findall(
        r"recipes/results/([\w-]+)/RESULTS\.md\) \|(.*)\|$", make_results_page.PAGE.read_text("utf-8"), re.M
    )
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_readme_counts_as_the_pages_do():
    load_all()
    results = _results()
    assert f"implements {len(names())} methods" in " ".join(README.split())
    assert f"{sum(not name.startswith('beyond') for name in known())} tables and figures" in README
    first = re.search(
        r"Table 1 on Digits-Five: (\d+) of (\d+) cells.*?On Office-Caltech-10[^:]*: (\d+) of (\d+) cells", README, re.S
    )
    within, judged, more_within, more_judged = map(int, first.groups())
    assert f"{within + more_within} of {judged + more_judged}" == results["fedwon-table-1"][0]
    assert results["fedwon-table-3"][0] == "16 of 16"
    assert results["fedwon-table-16"][0] == "8 of 8"
    assert "all 24 cells" in README
    assert f"Table 21: {results['fedwon-table-21'][0]}," in README
    orders = [row[2].split(" of ") for name, row in results.items() if name.startswith("fednn-table")]
    assert f"{sum(int(a) for a, _ in orders)} of {sum(int(b) for _, b in orders)} pairs" in README


def test_the_readme_compares_speed_and_bytes_as_the_page_of_performance_does():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    faster = [
        float(row.split("|")[7].strip(" *").partition("x")[0]) for row in re.findall(r"^\| \([a-e]\).*", page, re.M)
    ]
    assert len(faster) == 5
    assert f"[{min(faster):.0f} to {max(faster):.0f} times as fast](docs/performance.md)" in README
    sent = [re.findall(r"[\d,]{7,}", row)[:2] for row in re.findall(r"^\| bytes (?:up|down) .*", page, re.M)]
    ratios = [int(ours.replace(",", "")) / int(theirs.replace(",", "")) for ours, theirs in sent]
    assert f"at most {100 * (max(ratios) - 1):.0f} % more" in README


def test_the_readme_fits_two_screens():
    assert len(README.splitlines()) <= 100
    assert len(README.split()) <= 900


@pytest.mark.slow
def test_the_code_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names = {}
    exec(code.replace("rounds=20", "rounds=1").replace("seeds=3", "seeds=1"), names)
    assert names["result"].rounds == 1
    assert "scaffold + fedbn" in capsys.readouterr().out


FENCED = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def test_the_shell_lines_of_the_pages_are_commands_with_options_that_exist(monkeypatch, capsys):
    read, said = parsing.tyro.cli, {}

    def only_read(*args, **options):
        read(*args, **options)
        raise SystemExit(0)

    monkeypatch.setattr(parsing.tyro, "cli", only_read)
    for page in (ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        blocks = FENCED.findall(page.read_text(encoding="utf-8"))
        text = "".join(code for kind, code in blocks if kind in ("", "console", "sh", "bash")).replace("\\\n", " ")
        for line in re.findall(r"^ *(?:\$ )?fednorms ([a-z].*)$", text, re.MULTILINE):
            code = main(shlex.split(line, comments=True))
            said[page, line] = (code, capsys.readouterr().err)
    assert {line: err for line, (code, err) in said.items() if code} == {}
    assert sum(page == ROOT / "README.md" for page, _ in said) == 7
    assert len({page for page, _ in said}) > 10


def test_the_arrays_of_the_page_on_own_data_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/own-data.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "from_arrays" in code)
    names = {}
    exec(code, names)
    assert names["result"].rounds == 2


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))], ids=lambda p: p.stem)
def test_links_lead_to_files_of_the_repository(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_citation_names_the_newest_release():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[\d.]*)\] - (\S+)$", changes, re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == newest.groups()
    assert citation["license"] == "Apache-2.0"
