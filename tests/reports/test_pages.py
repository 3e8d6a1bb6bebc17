"""Reports: what they say follows from the numbers, and holds for runs that lack something."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

import fednorms as fn
from fednorms import BadInput, Federation, Site, Split
from fednorms.data.facts import Facts, SiteFacts
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.reports.run import run_page, summary
from fednorms.reports.stored import RunRecord
from fednorms.runs.comparison_files import write
from fednorms.runs.driver import execute
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from tests.support.pages import Read, read_page

SCRIPT = "<script>alert(1)</script>"
QUICK = {"rounds": 3, "batch_size": 6, "lr": 0.2}


def hospitals(*, classes=("cat", SCRIPT), names=("east", '"><img src=x onerror=alert(2)>'), images=40):
    """Sites whose names are markup, and a class that is a script."""
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k, name in enumerate(names):
        y = torch.arange(images) % len(classes)
        x = torch.rand(images, 3, 8, 8, generator=generator) * 0.5 + 0.02 * y.view(-1, 1, 1, 1) + 0.1 * k
        sites.append(Site(name, name, *(Split(x, y) for _ in range(3))))
    return Federation("hospitals", sites, list(classes))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fn.run("fedbn", hospitals(), **QUICK, out=tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "c"
    return fn.compare(["fedavg", "fedbn + fedprox"], hospitals(), **QUICK, seeds=2, out=out)


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that a test may damage."""
    shutil.copytree(run.path, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_run_is_reported_with_its_numbers_and_without_markup_from_names(run, tmp_path):
    file = fn.report(run)
    assert file == run.path / "report.html"
    page = read_page(file)
    assert f"fedbn has a mean accuracy of {100 * run.accuracy:.1f} %" in page.text
    assert SCRIPT in page.text  # as text
    for title in ("Sites and what they see", "Learning curves", "Calibration", "Which classes are confused"):
        assert title in page.text
    sites = next(t for t in page.tables if t[0][0] == "site")
    assert [row[:4] for row in sites[1:]] == [[s.name, "40", "40", "40"] for s in hospitals().sites]
    classes = next(t for t in page.tables if t[0][:2] == ["class", "images"])
    assert {row[0]: row[1] for row in classes[1:]} == {"cat": "40", SCRIPT: "40"}
    assert "fingerprint" in page.text
    assert "fednorms run " in page.text
    assert page.sources == []  # no image
    assert fn.report(run.path, tmp_path / "again.html").read_text() == file.read_text()


def test_a_comparison_is_reported_with_its_numbers(comparison):
    page = read_page(fn.report(comparison))
    methods = next(t for t in page.tables if t[0][0] == "method" and "mean" in t[0])
    for row in comparison.rows:
        line = next(line for line in methods if line[0] == row.label + row.mode)
        assert line[1].startswith(f"{100 * row.entries['mean'].mean:.1f}")
    assert methods[1][0].startswith(comparison.best)
    behind = comparison.difference(*sorted(comparison.methods, key=lambda m: m != comparison.best))
    assert methods[2][2].startswith(f"{100 * behind.value:.1f}{100 * behind.low:.1f} to {100 * behind.high:.1f}")
    assert f"{comparison.best} is best of 2 methods" in page.text
    by_site = [t for t in page.tables if t[0][0] == "site" and "fedavg" in t[0]]
    assert [row[0] for row in by_site[0][1:]] == [c for c in comparison.columns if c != "mean"]
    assert "No method was trained with differential privacy" in page.text
    again = read_page(fn.report(comparison.path, comparison.path / "again.html"))
    assert again.tables == page.tables


def test_a_failed_method_is_shown_as_failed(tmp_path):
    rates = {"fedavg": 0.2, "nonorm": 1e30}
    found = fn.compare(["fedavg", "nonorm"], hospitals(), rounds=2, seeds=1, lr=rates, out=tmp_path / "c")
    page = read_page(fn.report(found))
    methods = next(t for t in page.tables if t[0][0] == "method" and "mean" in t[0])
    assert "failed" in next(row for row in methods if row[0].startswith("nonorm"))
    assert "nonorm, seed 0 failed" in page.text


def test_every_summary_has_two_sentences(run, comparison):
    from fednorms.reports.comparison import summary as of_comparison
    from fednorms.reports.stored import ComparisonRecord

    for said in (summary(RunRecord.of(run)), of_comparison(ComparisonRecord.of(comparison))):
        assert len(said) == 2
        assert all(sentence.endswith(".") and sentence[0].isalnum() for sentence in said)


def test_the_summary_names_the_worst_site_and_class(run):
    record = RunRecord.of(run)
    first, second = summary(record)
    scores = run.scores()
    worst = min(scores.sites, key=lambda s: scores.sites[s].accuracy)
    assert f"weakest site is {worst} " in second
    assert f"weakest class is {record.judgement.worst_class} " in second
    assert "one seed" in second
    assert "80 test images of 2 sites" in first


def test_without_predictions_the_report_says_what_is_missing(copy):
    shutil.rmtree(copy / "predictions")
    page = read_page(fn.report(copy))
    assert "has not stored its predictions" in page.text
    assert "Calibration" not in page.text
    assert "Recall (%)" in page.text  # from the scores


def test_an_unfinished_run_is_reported_as_unfinished(copy):
    (copy / "summary.json").unlink()
    assert "the run has not finished" in read_page(fn.report(copy)).text


def test_a_run_without_test_images_is_reported(tmp_path):
    data = hospitals(names=("east", "west"))
    sites = [Site(s.name, s.domain, s.train) for s in data.sites]
    page = read_page(fn.report(fn.run("fedavg", Federation("f", sites, data.classes), **QUICK, out=tmp_path / "r")))
    assert "never tested" in page.text


def test_a_result_in_memory_needs_a_file_name(tmp_path):
    result = fn.run("fedavg", hospitals(), **QUICK)
    with pytest.raises(BadInput, match=r"not stored.*out="):
        fn.report(result)
    assert "has not stored its predictions" in read_page(fn.report(result, tmp_path / "r.html")).text


def across_machines(run: Result) -> RunRecord:
    """The run as a server across machines knows it: no images per class, no recall, no predictions."""
    facts = RunRecord.of(run).facts
    facts = replace(facts, sites=tuple(replace(site, images={}) for site in facts.sites))
    history = json.loads(json.dumps(run.history))
    for row in history:
        for values in row["scores"].values():
            for site in values["sites"].values():
                site["recall"] = []
    return RunRecord(replace(run, history=history, path=None), facts)


def test_a_server_across_machines_reports_without_data(run, tmp_path):
    (tmp_path / "r.html").write_text(run_page(across_machines(run)).html())
    page = read_page(tmp_path / "r.html")
    assert "did not say how many images of each class" in page.text
    sites = next(t for t in page.tables if t[0][0] == "site")
    assert [row[1] for row in sites[1:]] == ["40", "40"]  # test images, which come with the scores


def crowd(sites: int, classes: int) -> RunRecord:
    """A made-up run with many sites and classes."""
    names = [f"site {k:03d}" for k in range(sites)]
    score = SiteScore(0.5, 0.5, 1.0, 2 * classes, [0.5] * classes)
    scores = Scores("global", "global", "test", dict.fromkeys(names, score), {n: n for n in names})
    row = {"lr": 0.1, "clients": 10, "train_loss": 1.0, "dropped": 0, "diverged": [], "seconds": 1.0}
    row |= {"bytes_up": 10, "bytes_down": 10, "scores": {"global/global/test": scores.to_dict()}}
    history = [row | {"round": t} for t in range(1, 301)]
    images = {"train": [5] * classes, "test": [2] * classes}
    each = tuple(SiteFacts(n, n, images=images) for n in names)
    labels = tuple(f"class {c}" for c in range(classes))
    facts = Facts(
        "crowd", labels, (3, 8, 8), "uint8", fn.federation("digits-shift").preprocessing, each, tuple(names), 5
    )
    result = Result("fedavg", Recipe(), "global/global", history, domain_of={n: n for n in names})
    return RunRecord(result, facts)


def test_hundreds_of_sites_and_classes_stay_readable(tmp_path):
    (tmp_path / "r.html").write_text(run_page(crowd(400, 200)).html())
    page = read_page(tmp_path / "r.html")
    assert "The 30 largest of 400 sites" in page.text
    assert "the worst 30 of 400 sites" in page.text
    assert max(len(t) for t in page.tables) <= 201


@pytest.mark.parametrize("stored", [True, False])
def test_a_run_judged_by_balanced_accuracy_reports_it(stored, tmp_path):
    recipe = Recipe(method="fedbn", metric="balanced_accuracy", rounds=2)
    run = execute(recipe, out=tmp_path / "r", federation=hospitals())
    record = RunRecord.of(run) if stored else across_machines(run)
    sites = record.headline.sites
    worst = min(sites, key=lambda site: sites[site].balanced_accuracy)
    said = summary(record)
    assert f"a mean balanced accuracy of {100 * record.headline.balanced_accuracy:.1f} %" in said[0]
    assert f"The weakest site is {worst} at {100 * sites[worst].balanced_accuracy:.1f} %" in said[1]
    assert "nan" not in run_page(record).html()


def test_epsilon_is_reported(run, tmp_path):
    private = replace(
        run, privacy={"epsilon": 3.14159, "delta": 1e-5, "part": "dpcentral", "neighbours": "one left out"}
    )
    text = run_page(RunRecord(private, RunRecord.of(run).facts)).html()
    assert "Epsilon 3.14 at delta 1e-05" in text
    assert "no epsilon" in run_page(RunRecord.of(run)).html()


def test_images_are_shown_only_if_asked_for_and_with_a_warning(run, tmp_path):
    page = read_page(fn.report(run, tmp_path / "r.html", images=True, federation=hospitals()))
    assert "may be of patients" in page.text
    wrong = [round((1 - s.accuracy) * s.samples) for s in run.scores().sites.values()]
    assert sum(wrong)
    assert len(page.sources) == min(sum(min(n, 8) for n in wrong), 24)
    with pytest.raises(BadInput, match="federation="):
        fn.report(run, tmp_path / "r.html", images=True)
    with pytest.raises(BadInput, match="has changed since"):
        fn.report(run, tmp_path / "r.html", images=True, federation=hospitals(images=41))


def test_custom_models_are_not_imported(run):
    named = run.recipe.model_copy(update={"model": "no_such_module:Net"})
    page = Read(run_page(RunRecord(replace(run, recipe=named), None)).html())
    assert "could not be measured" in page.text


@pytest.mark.parametrize("what", ["nowhere", "no-such-table"])
def test_what_is_nothing_is_refused(what):
    with pytest.raises(BadInput, match="is not a run, comparison, table or advice"):
        fn.report(what)


def test_a_folder_is_not_a_file_for_the_report(run, tmp_path):
    with pytest.raises(BadInput, match="is a folder"):
        fn.report(run, tmp_path)


def test_a_run_without_a_round_is_refused(copy):
    (copy / "metrics.jsonl").write_text("")
    with pytest.raises(BadInput, match="no finished round"):
        fn.report(copy)


def test_a_damaged_comparison_is_refused(comparison, tmp_path):
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(BadInput, match="is not readable"):
        fn.report(tmp_path)


def test_a_report_made_later_keeps_what_is_known_of_searched_rates(comparison, tmp_path):
    assert "All methods used the learning rate" in fn.report(comparison, tmp_path / "fixed.html").read_text()
    folder = shutil.copytree(comparison.path, tmp_path / "searched")
    about = comparison.about | {"rates": "searched"}
    write(replace(comparison, about=about, notes=["fedavg: lr 0.1 is at the edge"], path=folder, files=[]), folder)
    page = fn.report(folder, tmp_path / "searched.html").read_text()
    assert "fedavg: lr 0.1 is at the edge" in page
    assert "All methods used the learning rate" not in page
