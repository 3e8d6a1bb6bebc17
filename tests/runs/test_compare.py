"""Comparisons from Python: the numbers of the table, failures, processes, files."""

from __future__ import annotations

import builtins
import csv
import json
import math
import statistics

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.data import Federation, Site, Split
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.runs import comparison_files
from fednorms.runs.cells import Averages, Outcome, RoundSummary
from fednorms.runs.comparison import Comparison, MeanStd
from fednorms.runs.run_names import slug
from tests.support.kept import SMALL


def small(unseen: bool = False) -> Federation:
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k, name in enumerate(("east", "west", "new")):
        y = torch.arange(12) % 2
        x = torch.rand(12, 3, 8, 8, generator=generator) * 0.5 + 0.3 * y.view(-1, 1, 1, 1) + 0.1 * k
        split = Split(x, y)
        if name != "new":
            sites.append(Site(name, name, split, split, split))
        elif unseen:
            sites.append(Site(name, name, test=split))
    return Federation("small", sites, ["cat", "dog"])


SETTINGS = {"rounds": 2, "seeds": 2, "batch_size": 6, "lr": 0.2}


@pytest.fixture(scope="module")
def comparison():
    return fn.compare(["fedavg", "fedbn"], small(unseen=True), **SETTINGS)


def test_entries_are_mean_and_sample_deviation_of_single_runs(comparison):
    row = comparison.rows[1]
    single = [
        fn.run("fedbn", small(unseen=True), rounds=2, seed=s, batch_size=6, lr=0.2, recipe=fn.Recipe(threads=1))
        for s in (0, 1)
    ]
    for domain in ("east", "west"):
        values = [r.domains[domain] for r in single]
        assert row.entries[domain].mean == pytest.approx(statistics.mean(values))
        assert row.entries[domain].std == pytest.approx(statistics.stdev(values))
    assert row.entries["mean"].mean == pytest.approx(statistics.mean(r.accuracy for r in single))
    assert row.mode == "personal/own"
    assert comparison.rows[0].mode == "global/global"
    unseen = [r.scores("unseen/global").domains["new"] for r in single]
    assert row.entries["new (unseen)"].mean == pytest.approx(statistics.mean(unseen))
    assert comparison.columns == ["east", "west", "new (unseen)", "mean"]


def test_the_best_of_each_column_is_marked(comparison):
    header, *rows = comparison.cells()
    for column in comparison.columns:
        at = header.index("new (unseen/global)" if column == "new (unseen)" else column)
        marked = [row.label for row, cells in zip(comparison.rows, rows, strict=True) if cells[at].endswith(" *")]
        top = max(row.entries[column].mean for row in comparison.rows)
        assert marked == [row.label for row in comparison.rows if row.entries[column].mean == top]
    by_mean = {row.label: row.entries["mean"].mean for row in comparison.rows}
    assert by_mean[comparison.best] == max(by_mean.values())
    assert repr(comparison).startswith("method")
    assert "seeds (0, 1)" in repr(comparison)


def test_the_curve_ends_at_the_table(comparison):
    curve = comparison.curve("fedbn")
    assert list(curve) == [1, 2]
    assert curve[2].mean == pytest.approx(comparison.rows[1].entries["mean"].mean)


def test_files_hold_the_same_numbers(comparison, tmp_path):
    comparison_files.write(comparison, tmp_path, small())
    assert {f.name for f in comparison.files} == {f.name for f in tmp_path.iterdir()}
    plain = json.loads((tmp_path / "comparison.json").read_text())
    table = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    for row, line, value in zip(comparison.rows, table, plain["rows"], strict=True):
        assert float(line["mean"]) == pytest.approx(100 * row.entries["mean"].mean, abs=0.006)
        assert value["accuracy"]["east"]["mean"] == row.entries["east"].mean
    markdown = (tmp_path / "comparison.md").read_text().splitlines()
    assert {line.count("|") for line in markdown[:4]} == {markdown[0].count("|")}


def test_without_matplotlib_one_line_says_how_to_get_it(comparison, tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    comparison_files.write(comparison, tmp_path)
    assert not (tmp_path / "curves.png").exists()
    assert [r for r in comparison.remarks() if "fednorms[report]" in r and "\n" not in r]
    comparison.notes = []


def test_a_diverged_method_is_named_and_the_others_continue():
    found = fn.compare(["fedavg", "nonorm"], small(), rounds=2, seeds=1, lr={"nonorm": 1e30})
    good, bad = found.rows
    assert good.entries
    assert not bad.entries
    assert bad.failed
    assert found.best == "fedavg"
    assert [o.label for o in found.failed] == ["nonorm"]
    assert found.cells()[2].count("failed") == 3
    assert "nonorm, seed 0 failed:" in repr(found)
    assert "failed" in comparison_files.markdown(found)
    assert comparison_files.figure(found) is not None


def test_some_seeds_may_fail():
    site = SiteScore(0.5, 0.5, 1.0, 2, [0.5, 0.5])
    tested = {"global/global/test": Scores("global", "global", "test", {"a": site}, {"a": "a"})}
    rounds = [RoundSummary(1, 1.0, 0.0, {"global/global/test": Averages(0.5, 0.5, 0.5)})]
    done = [Outcome("m", 0, 0.1, "global/global", rounds, tested), Outcome("m", 1, 0.1, error="no memory")]
    found = Comparison({"m": "m"}, [0, 1], done)
    assert found.rows[0].entries["a"] == MeanStd(0.5, None)
    assert found.curve("m") == {1: MeanStd(0.5, None)}
    assert found.rows[0].failed == {1: "no memory"}
    nothing = Comparison({"m": "m"}, [0], [Outcome("m", 0, 0.1, error="no memory")])
    assert nothing.best is None
    assert nothing.columns == ["mean"]
    assert nothing.to_dict()["best"] is None


def test_continued_in_a_directory_without_repeating(tmp_path):
    first = fn.compare(["fedavg"], small(), out=tmp_path, **SETTINGS)
    seen = []
    both = fn.compare(["fedavg", "fedbn"], small(), out=tmp_path, watch=seen.append, **SETTINGS)
    assert both.rows[0].entries == first.rows[0].entries
    assert {e.label for e in seen if e.outcome is None} == {"fedbn"}
    assert (tmp_path / "fedavg-0" / "summary.json").exists()
    assert (tmp_path / "fedbn-1" / "summary.json").exists()
    with pytest.raises(fn.BadInput, match="another recipe"):
        fn.compare(["fedavg"], small(), out=tmp_path, **{**SETTINGS, "lr": 0.1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": []}, "at least one method"),
        ({"methods": ["fedwon", "nonorm + wsconv + agc(min_batch=32)"]}, "twice"),
        ({"methods": ["fedavg"], "seeds": [1, 1]}, "different integers"),
        ({"methods": ["fedavg"], "jobs": 0}, "jobs"),
        ({"methods": ["fedavg"], "lr": {"fedbn": 0.1}}, "not compared"),
        ({"methods": ["fedavg", "gn + fedbn"], "out": "used"}, "fedbn"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fn.BadInput, match=words):
        fn.compare(**{"federation": small(), "rounds": 1, "seeds": 1} | change)
    assert not any(tmp_path.iterdir())


def test_balanced_accuracy_has_a_column_and_decides(tmp_path):
    asked = fn.Recipe.make({**SMALL, "rounds": 1, "metric": "balanced_accuracy"})
    comparison = fn.compare(["fedavg", "fedbn"], recipe=asked, seeds=2, out=tmp_path / "c")
    assert comparison.columns[-2:] == ["balanced", "accuracy"]
    for row in comparison.rows:
        of_row = [o for o in comparison.outcomes if o.label == row.label]
        plain = [o.scores[row.mode] for o in of_row]
        scores = [s.balanced_accuracy for s in plain]
        assert row.entries["balanced"].mean == pytest.approx(statistics.fmean(scores))
        for domain in comparison.columns[:-2]:
            at_domain = [o.scores[row.mode].judged_domains("balanced_accuracy") for o in of_row]
            assert row.entries[domain].mean == pytest.approx(statistics.fmean(d[domain] for d in at_domain))
            replicated = comparison._replicated[row.label, row.mode][domain].by_seed
            assert [column.value for column in replicated.values()] == pytest.approx([d[domain] for d in at_domain])
        assert row.entries["accuracy"].mean == pytest.approx(statistics.fmean(s.domain_mean for s in plain))
    assert comparison.best == max(comparison.rows, key=lambda row: row.entries["balanced"].mean).label
    assert comparison.about["accuracy"].endswith("balanced accuracy, but for the column accuracy")
    assert "balanced" in (tmp_path / "c" / "comparison.md").read_text().splitlines()[0]


def halved(logits, y):
    """A custom loss that worker processes can import."""
    return 0.5 * torch.nn.functional.cross_entropy(logits, y)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_custom_loss_is_used_in_training(jobs):
    recipe = fn.Recipe.make({**SMALL, "rounds": 1})
    mine = fn.compare(["fedavg"], recipe=recipe, seeds=2, loss=halved, jobs=jobs, lr=0.2)
    plain = fn.compare(["fedavg"], recipe=recipe, seeds=2, lr=0.1)  # half the loss at twice the rate is the same
    assert not mine.failed
    for one, other in zip(mine.outcomes, plain.outcomes, strict=True):
        assert one.scores["global/global"].loss == pytest.approx(other.scores["global/global"].loss, rel=1e-3)


def test_a_comparison_is_not_put_into_a_run(tmp_path):
    fn.run("fedavg", small(), rounds=1, batch_size=6, out=tmp_path / "run")
    with pytest.raises(fn.BadInput, match="holds a run"):
        fn.compare(["fedavg"], small(), **SETTINGS, out=tmp_path / "run")


def test_a_table_that_is_replaced_is_named(tmp_path):
    assert not fn.compare(["fedavg"], small(), **SETTINGS, out=tmp_path / "c").notes
    again = fn.compare(["fedbn"], small(), **SETTINGS, out=tmp_path / "c")
    assert "replaced an earlier table, which also had fedavg; its runs are kept" in again.notes
    assert "replaced" not in repr(fn.compare(["fedavg", "fedbn"], small(), **SETTINGS, out=tmp_path / "c"))


def test_oddities_of_the_data_are_reported():
    given = small()
    east, west = given.sites
    odd = Federation("odd", [east, Site("west", "west", west.train)], given.classes)
    found = fn.compare(["fedavg"], odd, **{**SETTINGS, "seeds": 1})
    assert "no test images: west; scores are those of the other sites" in found.remarks()
    assert found.remarks()[-1] in fn.run("fedavg", odd, rounds=1, batch_size=6).notes


def test_unseen_sites_must_exist_to_be_tested():
    with pytest.raises(fn.BadInput, match='"unseen" tests sites that do not train, but all 2 sites'):
        fn.run("fedavg", small(), rounds=1, batch_size=6, evaluate=["unseen"])


def test_a_named_federation_and_a_device_are_recorded(tmp_path):
    found = fn.federation("digits-shift", size=8, test=0.8)
    made = fn.compare(["fedavg"], found, rounds=1, seeds=1, device="cpu", out=tmp_path)
    assert made.about["data"].startswith("digits-shift, 5 clients")
    recipe = fn.Recipe.read(tmp_path / "fedavg-0" / "recipe.toml")
    assert (recipe.federation, recipe.data.size, recipe.device) == ("digits-shift", 8, "cpu")
    with pytest.raises(fn.BadInput, match="tpu"):
        fn.compare(["fedavg"], found, device="tpu")


def test_a_note_says_that_a_custom_model_starts_all_seeds_from_the_same_weights():
    mine = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    said = repr(fn.compare(["fedavg"], small(), mine, **SETTINGS))
    assert "first weights: those of your model in every seed" in said
    assert "first weights" not in repr(fn.compare(["fedavg"], small(), mine, **{**SETTINGS, "seeds": 1}))
    assert "first weights" not in repr(fn.compare(["fedavg"], small(), **SETTINGS))


def test_names_of_directories():
    assert slug("../../etc") == "etc"
    assert slug("a(b=1)") != slug("a(b=2)")
    assert math.isfinite(MeanStd.of([0.1, 0.1]).std)


def test_one_method_may_be_given_without_a_list():
    given = {"rounds": 1, "recipe": fn.Recipe(data={"size": 8})}
    assert list(fn.compare("fedavg", **given).methods) == list(fn.compare(fn.method("fedavg"), **given).methods)
