"""Searches: grids are tried on validation images only, stored, and their choice is what the table runs."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.data.readers import READERS
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.papers.tables import preflight
from fednorms.papers.tables.catalog import default_out, listed, open_table
from fednorms.papers.tables.plan import recipe_for
from fednorms.papers.tables.report import markdown
from fednorms.papers.tables.search import open_search, without_validation
from fednorms.papers.tables.store import ResultStore
from fednorms.papers.tables.stored_summary import stored_summary
from fednorms.runs.cells import Outcome, RoundSummary
from fednorms.runs.driver import execute
from tests.papers.tables.test_runs import Heard, heard
from tests.support.tables import copy_results, fails_while_running, put, results, searches, table

GRID = 'method = "fedbn"\nsearch = { "training.lr" = [1e-9, 0.1, 1e-8] }'


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    folder = table(root / "mini", change=('method = "fedbn"', GRID))
    done, ears = heard(folder, root / "out")
    return folder, root / "out", done, ears


def test_the_best_value_on_validation_images_is_what_the_table_runs(searched):
    _, out, *_ = searched
    found = searches(out)["FedBN"]
    assert found["chosen"] == {"training.lr": 0.1}  # the others learn nothing
    assert found["grid"] == {"training.lr": [1e-9, 0.1, 1e-8]}
    best = max(found["scores"], key=lambda entry: entry["mean"])
    assert best["values"] == found["chosen"]
    assert found["at_edge"] == ["training.lr"]  # the largest of them, at any position
    result = results(out)["shift", "FedBN", 0]
    assert result["recipe"]["training"]["lr"] == 0.1
    text = (out / "RESULTS.md").read_text()
    assert "lr 0.1 was chosen by accuracy on validation images" in text
    assert "edge of the grid" in text
    assert not (out / "runs").exists()


def test_a_search_never_looks_at_test_images(searched):
    _, out, *_ = searched
    found = searches(out)["FedBN"]
    assert found["recipe"]["evaluate"] == []
    recipe = fn.Recipe.make(found["recipe"])
    history = fn.run(recipe=recipe).history
    names = {name for row in history for name in row["scores"]}
    assert names == {"personal/own/val"}
    last = next(r["val"] for r in found["runs"] if r["values"]["training.lr"] == recipe.training.lr)
    assert history[-1]["scores"]["personal/own/val"]["mean"] == pytest.approx(last, abs=1e-6)


def validated(accuracy, balanced):
    """The outcome of a run of one round with these validation scores."""
    site = SiteScore(accuracy, balanced, 1.0, 10, [balanced, balanced])
    scores = Scores("personal", "own", "val", {"a": site}, {"a": "a"})
    return Outcome("", 0, 0.1, "personal/own", [RoundSummary(1, 1.0, 0.0, {})], {"personal/own/val": scores})


def test_a_search_ranks_by_the_metric_of_the_recipe(searched):
    folder, out, *_ = searched
    shown = open_table(folder)
    search = open_search(
        ResultStore(out / "elsewhere"), shown, shown.settings[0], next(r for r in shown.rows if r.search)
    )
    for metric, by_metric in (("accuracy", 0.7), ("balanced_accuracy", 0.4)):
        point = search.points[0]
        recipe = search.recipe(point, 0).model_copy(update={"metric": metric})
        search.add(point, 0, validated(0.7, 0.4), recipe)
        assert search.means[0] == (point, pytest.approx(100 * by_metric))


def test_a_finished_search_is_not_repeated_with_any_number_of_seeds(searched, tmp_path):
    folder, out, *_ = searched
    before = (out / "searches.json").read_bytes()
    done, _ = heard(folder, out, search=True, seeds=2)
    assert done.ran == 0
    assert (out / "searches.json").read_bytes() == before
    assert heard(folder, tmp_path / "out", search=True, seeds=2)[0].ran == 3  # nor does a new one have more


def test_a_search_has_ended_when_every_value_has_every_seed_of_a_search(searched, tmp_path):
    _, whole, *_ = searched
    folder = table(tmp_path / "mini", a=('method = "fedbn"', GRID), b=("seeds = 1", "seeds = 1\nsearch_seeds = 2"))
    copy_results(whole, tmp_path / "out")  # every value with seed 0
    shown = open_table(folder)
    search = open_search(ResultStore(tmp_path / "out"), shown, shown.settings[0], shown.rows[1])
    assert search.chosen is None
    assert [seed for _, seed in search.missing] == [1, 1, 1]
    done, _ = heard(folder, tmp_path / "out", search=True)
    assert done.ran == 3
    assert any("lr 0.1 was chosen" in text and "2 seeds" in text for text in done.summary.searches.sentences)
    assert searches(tmp_path / "out")["FedBN"]["chosen"] == {"training.lr": 0.1}


def test_a_search_on_other_data_is_named_and_repeated(searched, tmp_path):
    folder, whole, *_ = searched
    out = tmp_path / "out"
    copy_results(whole, out)
    values = searches(out)["FedBN"]
    values["recipe"]["fingerprint"] = values["data"]["fingerprint"] = "0" * 32
    put(out, values, file="searches.json", key="searches")
    shown, ears = heard(folder, out, report=True)
    assert any("other data" in text and "shift / FedBN" in text for text in ears.said)
    assert not any("was chosen" in text for text in shown.summary.searches.sentences)
    again, _ = heard(folder, out, search=True)
    assert again.ran == 3
    assert any("lr 0.1 was chosen" in text for text in again.summary.searches.sentences)
    assert heard(folder, out)[0].ran == 0  # the row's own results are still valid


def test_a_run_of_a_search_that_fails_is_recorded_and_tried_again(tmp_path, monkeypatch):
    fails_while_running(monkeypatch)
    folder = table(tmp_path / "mini", change=('method = "fedbn"', GRID))
    done, ears = heard(folder, tmp_path / "out")
    assert list(done.failed) == [f"shift / FedBN, lr {lr}, seed 0" for lr in ("1e-09", "0.1", "1e-08")]
    assert done.summary.sections[0].rows["FedBN"]["Avg"].verdict == "failed"
    assert done.summary.sections[0].rows["FedAvg"]["Avg"].ours is not None
    text = (tmp_path / "out/RESULTS.md").read_text()
    assert "FedBN (shift), seed 0 failed: in the search, lr 0.1: " in text
    assert "the search over training.lr has not ended; 3 of its runs failed." in text
    assert any("3 of its runs failed" in said for said in ears.said)
    assert heard(folder, tmp_path / "out", search=True)[0].ran == 3
    assert len(searches(tmp_path / "out")["FedBN"]["failed"]) == 3


def test_a_search_whose_failed_runs_succeed_forgets_them(tmp_path):
    made = open_table(table(tmp_path / "mini", change=('method = "fedbn"', GRID)))
    search = open_search(ResultStore(tmp_path / "out"), made, made.settings[0], made.rows[1])
    for point in search.points:
        recipe = search.recipe(point, 0).model_copy(update={"metric": "accuracy"})
        search.add(point, 0, Outcome("", 0, 0.1, error="no memory", kind="RuntimeError"), recipe)
        assert search.failed == [{"values": point, "seed": 0, "error": "no memory"}]
        search.add(point, 0, validated(0.7, 0.4), recipe)
        assert search.failed == []
    assert search.ended


def test_a_row_whose_values_all_diverge_is_shown_as_diverged(tmp_path, monkeypatch):
    grid = 'method = "nonorm"\nsearch = { "training.lr" = [1e30, 1e31] }'
    folder, out = table(tmp_path / "mini", change=('method = "fedbn"', grid)), tmp_path / "out"
    done, _ = heard(folder, out, only=["FedBN"])
    assert (done.ran, done.failed) == (2, {})
    entry = done.summary.sections[0].rows["FedBN"]["Avg"]
    assert (entry.verdict, entry.diverged) == ("miss", 1)
    assert done.summary.score == (0, 1)
    text = (out / "RESULTS.md").read_text()
    assert "all values of the search diverged (lr 1e+30; lr 1e+31; 1 seed)" in text
    assert "has not ended" not in text
    assert "| FedBN | " in text
    assert "diverged ✗<br>0.1" in text
    search = searches(out)["FedBN"]
    assert search["status"] == "diverged"
    assert all(run["error"].startswith("Client ") for run in search["runs"])  # which client, and in which round
    assert heard(folder, out, only=["FedBN"])[0].ran == 0
    assert (out / "RESULTS.md").read_text() == text
    whole, _ = heard(folder, out)  # next to a row that has runs
    assert whole.ran == 1
    assert whole.summary.score == (0, 2)

    monkeypatch.chdir(tmp_path)
    shutil.copytree(out, default_out(open_table(folder)))
    assert listed(open_table(folder)).done == 2  # of four: nothing is left to run in this setting


def test_the_time_of_a_search_is_measured_without_test_images(tmp_path, monkeypatch):
    made = open_table(table(tmp_path / "mini", change=('method = "fedbn"', GRID)))
    search = open_search(ResultStore(tmp_path), made, made.settings[0], made.rows[1])
    scores = set()

    def watched(recipe, *, callback, **options):
        def after_round(event):
            scores.update(event.row["scores"])
            callback(event)

        return execute(recipe, callback=after_round, **options)

    monkeypatch.setattr(preflight, "execute", watched)
    assert preflight.measured(search.recipe(search.points[0], 0)) > 0
    assert scores == {"personal/own/val"}


def test_long_rounds_are_timed_by_a_few_of_their_steps(tmp_path, monkeypatch):
    made = open_table(table(tmp_path / "mini", a=("batch_size = 16", "batch_size = 4")))
    recipe = recipe_for(made, made.settings[0], made.rows[1], 0, {})
    asked = []

    def watched(recipe, **options):
        asked.append(recipe.training.steps)
        return execute(recipe, **options)

    monkeypatch.setattr(preflight, "execute", watched)
    assert preflight.measured(recipe) > 0
    assert asked == [1, None], "one step tells that rounds are short"
    asked.clear()
    monkeypatch.setattr(preflight, "_LONG", 0.0)
    assert preflight.measured(recipe) > 0
    assert asked == [1, 4]


def test_another_grid_or_recipe_starts_again(searched, tmp_path):
    folder, out, *_ = searched
    wider = table(tmp_path / "wider", change=('method = "fedbn"', GRID.replace("1e-8", "1e-8, 0.2")))
    longer = table(tmp_path / "longer", a=('method = "fedbn"', GRID), b=("rounds = 2", "rounds = 3"))
    same = open_table(folder)
    assert open_search(ResultStore(out), same, same.settings[0], same.rows[1]).chosen == {"training.lr": 0.1}
    for other in (open_table(wider), open_table(longer)):
        assert open_search(ResultStore(out), other, other.settings[0], other.rows[1]).chosen is None


def test_an_interrupted_search_continues_and_rows_wait_for_it(searched, tmp_path):
    folder, whole, *_ = searched
    with pytest.raises(KeyboardInterrupt):
        fn.reproduce(folder, out=tmp_path / "out", device="cpu", observer=Heard(stop_at=3))
    done, _ = heard(folder, tmp_path / "out", search=True)
    assert done.ran == 2
    assert not (tmp_path / "out" / "results.json").exists()  # search=True stops before them
    one, two = (searches(o)["FedBN"] for o in (whole, tmp_path / "out"))
    assert one["scores"] == two["scores"]


def test_a_choice_stored_with_the_table_is_used(searched, tmp_path):
    _, out, *_ = searched
    folder = table(tmp_path / "mini", change=('method = "fedbn"', GRID))
    shutil.copy(out / "searches.json", folder)
    done, _ = heard(folder, tmp_path / "out", only=["FedBN"])
    assert done.ran == 1
    assert not (tmp_path / "out" / "searches.json").exists()


def test_without_validation_images_there_is_no_search(tmp_path):
    change = ("val = 0.1", "val = 0.0")
    folder = table(tmp_path / "mini", a=('method = "fedbn"', GRID), b=change)
    with pytest.raises(BadInput, match=r'Row "FedBN".*needs validation images.*Give the setting data\.val above 0'):
        heard(folder, tmp_path / "out")


@pytest.mark.parametrize("name", [*READERS, "digits-shift", "pack:mine.fnpack"])
def test_data_val_is_suggested_only_where_it_works(tmp_path, name):
    made = open_table(table(tmp_path / "mini"))
    recipe = fn.Recipe.make({"federation": name})
    said = str(without_validation(made.settings[0], made.rows[0], recipe))
    try:
        fn.federation(name, val=0.1, root=tmp_path / "nothing" if name in READERS else None)
        refused = ""
    except BadInput as error:
        refused = str(error)
    assert ("data.val" not in said) == ('no option "val"' in refused or "is packed" in refused)
    assert said.endswith("the row a value instead of a search.")


def digits(root, images=1500):
    """Digits-Five of 2-pixel images, each with its own value, in the layout of npz files."""
    for name in ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST_M"):
        (root / name).mkdir(parents=True)
        x = np.arange(images, dtype=np.uint16).view(np.uint8).reshape(images, 1, 2).repeat(2, 1)
        for part in ("train", "test"):
            np.savez(root / name / f"{part}.npz", x=x, y=np.arange(images) % 10)
    return root


@pytest.mark.parametrize("protocol", ["fedwon", "fednn", "fedwon-cross-device"])
def test_validation_images_of_digits_five_are_743_to_1485_and_do_not_train(tmp_path, protocol):
    root = digits(tmp_path / "digits")

    def numbers(sites, part):
        splits = [s.splits[part] for s in sites if part in s.splits]
        values = [split.x[:].long() for split in splits]
        return sorted(int(v) for x in values for v in x[:, 0, 0, 0] + 256 * x[:, 0, 0, 1])

    plain = fn.federation("digits-five", root=root, protocol=protocol, size=2, complete=False)
    held = fn.federation("digits-five", root=root, protocol=f"{protocol}-val", size=2, complete=False)
    for domain in ("mnist", "usps"):
        before, after = ([s for s in f.sites if s.domain == domain] for f in (plain, held))
        assert numbers(before, "val") == []
        assert numbers(after, "val") == list(range(743, 1486))
        assert numbers(after, "train") == [i for i in numbers(before, "train") if not 743 <= i < 1486]
        assert numbers(after, "test") == numbers(before, "test")


def test_a_search_on_digits_five_takes_the_validation_protocol(tmp_path):
    text = """
    paper = "p"
    label = "l"
    title = "t"
    [recipe]
    federation = "digits-five"
    data = { protocol = "fedwon" }
    [[settings]]
    name = "d"
    [settings.columns]
    Avg = "mean"
    [[rows]]
    name = "FedAvg"
    method = "fedavg"
    search = { "training.lr" = [0.1] }
    """
    made = open_table(table(tmp_path / "t", text))
    search = open_search(ResultStore(tmp_path), made, made.settings[0], made.rows[0])
    assert search.recipe({"training.lr": 0.1}, 0).data.protocol == "fedwon-val"


def test_searches_of_one_value_are_shown_in_a_table():
    shown = open_table("beyond-digits")
    summary = stored_summary(shown, shown.results)
    (grid,), stored = summary.searches.tables, searches(shown.results)
    assert {row[0] for row in grid.rows} == set(stored)
    assert not summary.searches.others
    text = markdown(summary)
    assert "was chosen by" not in text
    for name, *cells in grid.rows:
        tried = dict(zip(map(float, grid.header[1:]), cells, strict=True))
        scores = {entry["values"]["training.lr"]: entry["mean"] for entry in stored[name]["scores"]}
        assert [value for value, cell in tried.items() if cell] == sorted(scores)
        assert tried[stored[name]["chosen"]["training.lr"]] == f"{max(s for s in scores.values() if s):.1f} (chosen)"
        assert sum("chosen" in cell for cell in cells) == 1
        assert [v for v, cell in tried.items() if cell == "diverged"] == [v for v, s in scores.items() if s is None]
    at_edge = grid.notes[-1].removeprefix("Chosen at the edge of the grid: ").removesuffix(".").split("; ")
    assert set(at_edge) == {name for name, values in stored.items() if values["at_edge"]}
