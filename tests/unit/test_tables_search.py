"""Searches: grids are tried on validation images only, stored, and their choice is what the table runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fednorms as fn
from fednorms.errors import BadInput
from fednorms.runs.cells import Outcome
from fednorms.tables.folders import open_table
from fednorms.tables.plan import Shelf
from fednorms.tables.search import open_search
from tests.tables import table
from tests.unit.test_tables_runs import Heard, heard

GRID = 'method = "fedbn"\nsearch = { "training.lr" = [1e-9, 0.1, 1e-8] }'


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    folder = table(root / "mini", change=('method = "fedbn"', GRID))
    done, ears = heard(folder, root / "out")
    return folder, root / "out", done, ears


def test_the_best_value_on_validation_images_is_what_the_table_runs(searched):
    _, out, *_ = searched
    found = json.loads((out / "search/shift/fedbn.json").read_text())
    assert found["chosen"] == {"training.lr": 0.1}  # the others learn nothing
    assert found["grid"] == {"training.lr": [1e-9, 0.1, 1e-8]}
    best = max(found["scores"], key=lambda entry: entry["mean"])
    assert best["values"] == found["chosen"]
    assert found["at_edge"] == ["training.lr"]  # the largest of them, wherever it stands
    result = json.loads((out / "results/shift/fedbn/seed-0.json").read_text())
    assert result["recipe"]["training"]["lr"] == 0.1
    text = (out / "RESULTS.md").read_text()
    assert "lr 0.1 was chosen by accuracy on validation images" in text
    assert "edge of the grid" in text
    assert not (out / "runs").exists()


def test_a_search_never_looks_at_test_images(searched):
    _, out, *_ = searched
    found = json.loads((out / "search/shift/fedbn.json").read_text())
    assert found["recipe"]["evaluate"] == []
    recipe = fn.Recipe.make(found["recipe"])
    history = fn.run(recipe=recipe).history
    names = {name for row in history for name in row["scores"]}
    assert names == {"personal/own/val"}
    last = next(r["val"] for r in found["runs"] if r["values"]["training.lr"] == recipe.training.lr)
    assert history[-1]["scores"]["personal/own/val"]["mean"] == pytest.approx(last, abs=1e-6)


def test_a_search_ranks_by_the_metric_of_the_recipe(searched):
    folder, out, *_ = searched
    shown = open_table(folder)
    search = open_search(Shelf(out / "elsewhere"), shown, shown.settings[0], next(r for r in shown.rows if r.search))
    for metric, by_metric in (("accuracy", 0.7), ("balanced_accuracy", 0.4)):
        point = search.points[0]
        recipe = search.recipe(point, 0).model_copy(update={"metric": metric})
        row = {"round": 1, "seconds": 1.0, "scores": {"personal/own/val": {"mean": 0.7, "balanced_accuracy": 0.4}}}
        search.add(point, 0, Outcome("", 0, 0.1, "personal/own", [row]), recipe)
        assert search.means[0] == (point, pytest.approx(100 * by_metric))


def test_a_finished_search_is_not_repeated_with_any_number_of_seeds(searched):
    folder, out, *_ = searched
    before = (out / "search/shift/fedbn.json").read_bytes()
    done, _ = heard(folder, out, search=True, seeds=2)
    assert done.ran == 0
    assert (out / "search/shift/fedbn.json").read_bytes() == before


def test_another_grid_or_recipe_starts_anew(searched, tmp_path):
    folder, out, *_ = searched
    wider = table(tmp_path / "wider", change=('method = "fedbn"', GRID.replace("1e-8", "1e-8, 0.2")))
    longer = table(tmp_path / "longer", a=('method = "fedbn"', GRID), b=("rounds = 2", "rounds = 3"))
    same = open_table(folder)
    assert open_search(Shelf(out), same, same.settings[0], same.rows[1]).chosen == {"training.lr": 0.1}
    for other in (open_table(wider), open_table(longer)):
        assert open_search(Shelf(out), other, other.settings[0], other.rows[1]).chosen is None


def test_an_interrupted_search_goes_on_and_rows_wait_for_it(searched, tmp_path):
    folder, whole, *_ = searched
    with pytest.raises(KeyboardInterrupt):
        fn.reproduce(folder, out=tmp_path / "out", device="cpu", observer=Heard(stop_at=3))
    done, _ = heard(folder, tmp_path / "out", search=True)
    assert done.ran == 2
    assert not (tmp_path / "out" / "results").exists()  # search=True stops before them
    one, two = (json.loads((o / "search/shift/fedbn.json").read_text()) for o in (whole, tmp_path / "out"))
    assert one["scores"] == two["scores"]


def test_a_choice_stored_beside_the_table_is_used(searched, tmp_path):
    _, out, *_ = searched
    folder = table(tmp_path / "mini", change=('method = "fedbn"', GRID))
    (folder / "search/shift").mkdir(parents=True)
    (folder / "search/shift/fedbn.json").write_bytes((out / "search/shift/fedbn.json").read_bytes())
    done, _ = heard(folder, tmp_path / "out", only=["FedBN"])
    assert done.ran == 1
    assert not (tmp_path / "out" / "search").exists()


def test_without_validation_images_there_is_no_search(tmp_path):
    change = ("val = 0.1", "val = 0.0")
    folder = table(tmp_path / "mini", a=('method = "fedbn"', GRID), b=change)
    with pytest.raises(BadInput, match=r'row "FedBN".*needs validation images'):
        heard(folder, tmp_path / "out")


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
    search = open_search(Shelf(tmp_path), made, made.settings[0], made.rows[0])
    assert search.recipe({"training.lr": 0.1}, 0).data.protocol == "fedwon-val"
