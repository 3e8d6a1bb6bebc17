"""What results and comparisons look like: HTML, Markdown, LaTeX, data frames and pictures have the same numbers."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fednorms as fn
from tests.runs.test_compare import small

QUICK = {"rounds": 3, "batch_size": 6, "lr": 0.1}


class Tables(HTMLParser):
    """The cells of all tables; every tag must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def result():
    return fn.run("fedbn", small(unseen=True), **QUICK)


@pytest.fixture(scope="module")
def comparison():
    return fn.compare(["fedavg", "fedbn"], small(unseen=True), seeds=2, **QUICK)


def test_a_result_as_html_markdown_and_latex(result):
    rows = Tables(result._repr_html_()).rows
    assert rows[0] == ["model/statistics", "split", "east", "west", "new", "mean", "std over sites"]
    personal = next(row for row in rows if row[0] == "personal/own")
    assert personal[2] == f"{100 * result.domains['east']:.1f}"
    assert personal[-2] == f"{100 * result.accuracy:.1f}"
    assert "3 rounds" in result._repr_html_()
    markdown = [line.strip("| ").split(" | ") for line in result.to_markdown().splitlines()]
    assert [markdown[0], *markdown[2:]] == rows
    latex = result.to_latex().splitlines()
    assert [line.removesuffix(r" \\").split(" & ") for line in latex if "&" in line] == rows
    assert latex[0] == r"\begin{tabular}{llrrrrr}"


def test_only_several_sites_have_a_spread_and_a_worst_one(result):
    personal, unseen = (next(line for line in repr(result).splitlines() if name in line) for name in ("own", "unseen"))
    assert re.search(r"accuracy [\d.]+ % \(std over sites [\d.]+, worst \w+ [\d.]+\)$", personal)
    assert re.search(r"accuracy [\d.]+ %$", unseen)  # one site


def test_names_cannot_inject_markup():
    federation = fn.from_arrays({"<b>&|*": (small().sites[0].train.x, small().sites[0].train.y)}, name="<script>")
    result = fn.run("fedavg", federation, rounds=1, batch_size=4)
    for shown in (federation._repr_html_(), result._repr_html_()):
        assert "<script>" not in shown
        assert any("<b>&|*" in cell for row in Tables(shown).rows for cell in row)
    lines = result.to_markdown().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {lines[1].count("|")}
    assert r"<b>\&|*" in result.to_latex()


def test_a_result_without_tests_still_shows():
    site = small().sites[0]
    federation = fn.Federation("bare", [fn.Site("a", "a", site.train)], ["cat", "dog"])
    result = fn.run("fedavg", federation, rounds=1, batch_size=4)
    assert "not tested" in result._repr_html_()
    assert len(Tables(result._repr_html_()).rows) == 1
    assert list(result.to_frame()["test_accuracy"].isna()) == [True]
    assert result.plot()._repr_png_().startswith(b"\x89PNG")


def test_the_frame_of_a_result_counts_rounds_from_1(result):
    pytest.importorskip("pandas")
    frame = result.to_frame()
    assert list(frame["round"]) == [1, 2, 3]
    assert list(frame["test_accuracy"]) == [accuracy for _, accuracy in result.curve()]
    assert list(frame["train_loss"]) == [row["train_loss"] for row in result.history]
    assert "epsilon" not in frame
    sites = result.to_frame(by="site")
    last = sites[(sites["round"] == 3) & (sites["mode"] == "personal/own") & (sites["split"] == "test")]
    assert dict(zip(last["site"], last["accuracy"], strict=True)) == {
        name: site.accuracy for name, site in result.scores().sites.items()
    }
    with pytest.raises(fn.BadInput, match='by= must be "round" or "site", got "sites"'):
        result.to_frame(by="sites")


def test_a_comparison_as_html_and_latex(comparison):
    header, *rows = Tables(comparison._repr_html_()).rows
    assert header == ["method", "model/statistics", "east", "west", "new (unseen/global)", "mean"]
    assert [row[0] for row in rows] == [row.label for row in comparison.rows]
    assert rows[0][-1] == str(comparison.rows[0].entries["mean"])
    best = {
        str(row.entries["mean"]) for row in comparison.rows if row.entries["mean"].mean == comparison.best_in("mean")
    }
    assert all(f"<b>{text}</b>" in comparison._repr_html_() for text in best)
    latex = comparison.to_latex()
    assert latex.count(r" \\") == 1 + len(rows)
    assert all(rf"\textbf{{{text.replace('±', '$' + chr(92) + 'pm$')}}}" in latex for text in best)
    assert comparison.to_markdown().startswith("| method | model/statistics |")


def test_the_frame_of_a_comparison_has_plain_columns(comparison):
    pytest.importorskip("pandas")
    frame = comparison.to_frame()
    about = ["method", "mode", "lr", "seeds", "failed"]
    columns = ["east", "east_std", "west", "west_std", "new_unseen", "new_unseen_std", "mean", "mean_std"]
    assert list(frame.columns) == about + columns
    assert list(frame["mean"]) == [row.entries["mean"].mean for row in comparison.rows]
    seeds = comparison.to_frame(by="seed")
    mine = seeds[(seeds["method"] == "fedbn") & (seeds["mode"] == "personal/own")]
    assert list(mine["seed"]) == [0, 1]
    assert mine["mean"].mean() == pytest.approx(frame[frame["mode"] == "personal/own"]["mean"].item())
    assert list(seeds.groupby(["method", "mode"])["mean"].std()) == pytest.approx(list(frame["mean_std"]))


def test_pictures_of_results_and_comparisons(result, comparison, tmp_path):
    pytest.importorskip("matplotlib")
    left, right = result.plot().axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in left.get_lines()}
    assert drawn["mean over sites"] == [[t, pytest.approx(100 * accuracy)] for t, accuracy in result.curve()]
    assert {"east", "west"} < set(drawn)
    assert [t for t, _ in right.get_lines()[0].get_xydata()] == [1, 2, 3]
    comparison.plot().savefig(tmp_path / "compared.png")
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")
    assert comparison.plot(small())._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(("package", "extra"), [("matplotlib", "report"), ("pandas", "frame")])
def test_a_missing_package_is_named_with_its_extra(package, extra, result, comparison, monkeypatch):
    from fednorms.core import optional

    real = builtins.__import__

    def refuse(name, *args):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args)

    optional._figure_class.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    for thing in (result, comparison):
        with pytest.raises(fn.BadInput, match=rf"{package}. Install it with `pip install 'fednorms\[{extra}\]'`"):
            thing.plot() if package == "matplotlib" else thing.to_frame()


def test_a_notebook_shows_figures_and_tables(tmp_path, result):
    pytest.importorskip("IPython")
    pytest.importorskip("matplotlib")
    from tests.support.notebook import kernel

    with kernel(tmp_path) as notebook:
        notebook.shell.user_ns |= {"result": result}
        picture, table = notebook.run("display(result.plot()); display(result)")
    assert "image/png" in picture["data"]
    assert table["data"]["text/html"] == result._repr_html_()
    assert table["data"]["text/plain"] == repr(result)


def test_a_description_as_html():
    description = fn.describe("scaffold + fedbn")
    rows = Tables(description._repr_html_()).rows
    local = next(row for row in rows if row[0] == "LOCAL")
    assert local[2] == str(sum(route.name == "LOCAL" for route in description.routes.values()))
    assert next(row for row in rows if row[0] == "scaffold")[2] == next(
        line.split()[1] + " kB" for line in repr(description).splitlines() if line.startswith("  scaffold")
    )
    for what, how in [row for row in rows if row[0] in ("acts on", "clients keep state", "uses published weights")]:
        assert re.search(rf"  {what} +{re.escape(how)}$", repr(description), re.MULTILINE)


@pytest.mark.slow
def test_the_page_on_notebooks_does_what_it_says(tmp_path, monkeypatch):
    for package in ("matplotlib", "pandas", "tensorboard"):
        pytest.importorskip(package)
    page = Path(__file__).parents[2] / "docs/notebooks-and-tracking.md"
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(code.replace("rounds=3", "rounds=1").replace("seeds=2", "seeds=1"), names)  # as quick as it can be
    assert list(names["curve"]["round"]) == [1]
    assert names["table"].startswith(r"\begin{tabular}")
    assert list((tmp_path / "runs/tracked/tensorboard").iterdir())
    assert {"sites.png", "methods.png"} < {file.name for file in tmp_path.iterdir()}
