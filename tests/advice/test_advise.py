"""`advise` on tiny federations: what it reads, that it repeats, continues, and answers mistakes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fednorms as fn
from fednorms.advice import advise as module
from fednorms.advice.advise import advise
from fednorms.advice.arms import CANDIDATES, Question, propose
from fednorms.advice.priors import expected_loss, records
from fednorms.advice.tournament import Trial
from fednorms.advice.training import Trainer, with_options
from fednorms.advice.validation import for_validation

SMALL = {"rounds": 3, "budget": 100, "rates": [0.1], "seeds": 2, "methods": ["fedavg", "fedbn"], "batch_size": 8}


@pytest.fixture(scope="module")
def data():
    return fn.federation("digits-dials(clients=2, feature=0.8)", size=8, val=0.1, test=0.85)


class Forbidden:
    """Stands for images that nobody may read."""

    def __getattr__(self, name):
        raise AssertionError("test images were read")

    __getitem__ = __len__ = __iter__ = lambda self, *_: Forbidden.__getattr__(self, "")


def plain(advice):
    values = advice.to_dict()
    for rung in values["rungs"]:
        for played in rung["played"]:
            played.pop("seconds")
    return {k: v for k, v in values.items() if k not in ("path", "files", "answer")} | {
        "answer": {k: v for k, v in values["answer"].items() if k != "command"}
    }


def test_test_images_are_never_read(data, tmp_path):
    sites = [replace(site, test=replace(site.test)) for site in data.sites]
    closed = replace(data, sites=sites)
    for site in closed.sites:
        object.__setattr__(site.test, "x", Forbidden())
        object.__setattr__(site.test, "y", Forbidden())
    with pytest.raises((AssertionError, TypeError), match=r"were read|Forbidden"):
        fn.run("fedavg", closed, rounds=1)  # the trap works
    advice = advise(closed, out=tmp_path / "advice", **SMALL)
    assert advice.finished
    assert advice.method in SMALL["methods"]


def test_scores_are_those_of_plain_runs(data, tmp_path):
    advice = advise(data, out=tmp_path / "advice", **SMALL)
    held = for_validation(data)[0]
    for played in advice.rungs[-1].played:
        run = fn.run(played.trial.method, held, rounds=3, lr=0.1, batch_size=8, seed=played.seed)
        assert played.score == run.scores(split="val").mean
        assert list(played.curve) == run.curve(split="val")
    best = max(advice.finalists, key=lambda f: f.mean)
    assert advice.method == best.trial.arm
    assert {p.seed for p in advice.rungs[-1].played} == {0, 1}


def test_interrupted_equals_uninterrupted(data, tmp_path, monkeypatch):
    whole = advise(data, out=tmp_path / "whole", **SMALL)
    original, calls = Trainer.play, []

    def play(self, jobs, rounds):
        calls.append(rounds)
        self.watch = interrupting if len(calls) == 2 else self.watch
        return original(self, jobs, rounds)

    def interrupting(event):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "play", play)
    with pytest.raises(KeyboardInterrupt):
        advise(data, out=tmp_path / "cut", **SMALL)
    so_far = json.loads((tmp_path / "cut" / "advice.json").read_text())
    assert so_far["finished"] is False
    assert "best so far" in so_far["answer"]["sentence"]
    monkeypatch.setattr(Trainer, "play", original)
    assert plain(advise(data, out=tmp_path / "cut", **SMALL)) == plain(whole)


def test_a_finished_advice_trains_nothing_again(data, tmp_path, monkeypatch):
    first = advise(data, out=tmp_path / "a", **SMALL)
    monkeypatch.setattr("fednorms.advice.training.run_cells", None)
    monkeypatch.setattr(module, "probe", None)
    assert plain(advise(data, out=tmp_path / "a", **SMALL)) == plain(first)


def test_a_file_that_a_killed_search_left_without_its_name_does_not_block_it(data, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".41bc768fad67.tmp").write_text("half")
    assert advise(data, out=tmp_path / "a", **SMALL).finished


def test_another_question_in_the_same_folder_is_refused(data, tmp_path):
    advise(data, out=tmp_path / "a", **SMALL)
    with pytest.raises(fn.BadInput, match=r"another question\. These differ: budget"):
        advise(data, out=tmp_path / "a", **SMALL | {"budget": 99})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.png").touch()
    with pytest.raises(fn.BadInput, match="holds no search"):
        advise(data, out=tmp_path / "other", **SMALL)


def test_files_and_text(data, tmp_path):
    advice = advise(data, out=tmp_path / "a", retrain=True, **SMALL)
    assert json.loads((tmp_path / "a" / "advice.json").read_text())["answer"]["method"] == advice.method
    assert f"# Advice: {advice.method}" in (tmp_path / "a" / "advice.md").read_text()
    assert max(map(len, repr(advice).splitlines())) <= 80 or str(tmp_path) in repr(advice)
    assert advice.method in advice._repr_html_()
    recipe = fn.Recipe.read(tmp_path / "a" / "advised.toml")
    assert (recipe.training.lr, recipe.rounds) == (advice.lr, 3)
    assert 0 <= advice.retrained.accuracy <= 1
    assert (tmp_path / "a" / "final" / "summary.json").exists()
    pytest.importorskip("matplotlib")
    assert len(advice.plot().axes) == 2


def test_no_time_left_is_said(data):
    advice = advise(data, **SMALL | {"budget": 1})
    assert advice.verdict == "untested"
    assert "no time" in advice.sentence
    assert not advice.rungs


def test_what_the_budget_had_no_room_for_is_said(data):
    scarce = advise(data, **SMALL | {"budget": 9, "rates": [0.03, 0.1, 0.3]})
    assert [len(arm.rates) for arm in scarce.arms] == [1, 1]
    said = next(note for note in scarce.notes if "had room for" in note)
    assert "1 of 3 learning rates, 1 of 2 seeds" in said
    assert not any("had room for" in note for note in advise(data, **SMALL).notes)


def test_a_method_that_reached_the_last_rung_is_not_out(data):
    methods = ["fedavg", "fedbn", "gn", "standalone"]
    found = advise(data, **SMALL | {"methods": methods, "seeds": 1, "rounds": 2})
    assert {p.trial.arm for p in found.rungs[-1].played} == set(methods)
    assert len(found.finalists) == 3
    header, rows = found._score_table()
    gap = {row[0]: (float(row[3]), row[header.index("points")]) for row in rows}
    best = found.finalists[0]
    for arm in set(methods) - {best.trial.arm}:
        score, said = gap[arm]
        assert float(said.split()[0]) == pytest.approx(score - 100 * best.mean, abs=0.11)
        assert "-0.0" not in said


def test_one_method_is_not_said_to_be_better_than_others(data):
    found = advise(data, **SMALL | {"methods": ["standalone"], "seeds": 1})
    assert found.runner_up is None
    assert "nothing was compared with it" in found.sentence
    assert "does better than any federated method" not in found.sentence


def test_minutes_are_measured_once(data, tmp_path):
    given = {k: v for k, v in SMALL.items() if k != "budget"} | {"minutes": 0.05}
    first = advise(data, out=tmp_path / "a", **given)
    again = advise(data, out=tmp_path / "a", **given)
    assert first.budget == again.budget
    assert first.budget.seconds > 0


def test_a_method_bound_to_rounds_starts_anew(data, tmp_path):
    advice = advise(data, out=tmp_path / "a", **SMALL | {"methods": ["fixbn", "fedavg", "fedbn", "gn"]})
    assert any("fixbn" in note and "anew" in note for note in advice.notes)
    assert len(list((tmp_path / "a" / "runs").glob("fixbn*"))) >= 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"minutes": 1.0}, "not both"),
        ({"one_model": True, "personal": True}, "exclude each other"),
        ({"seeds": 0}, "seeds= must be"),
        ({"rates": [0.0]}, "positive"),
        ({"epsilon": 0.0}, "must be positive"),
        ({"methods": ["fedavg", "fedavg"]}, "given twice"),
        ({"methods": ["fedbnn"]}, "fedbn"),
        ({"methods": ["fedbn"], "one_model": True}, "No method fits: fedbn"),
        ({"retrain": True}, "needs a folder"),
        ({"budget": -1}, "0 or more"),
    ],
)
def test_mistakes_give_a_clear_error_before_anything_is_measured(data, given, said, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "probe", Forbidden())
    with pytest.raises(fn.BadInput, match=said):
        advise(data, **SMALL | ({} if "retrain" in given else {"out": tmp_path / "advice"}) | given)
    assert not (tmp_path / "advice").exists()


def images(sites, classes=("a", "b"), val=0.0):
    made = {name: (np.random.default_rng(0).integers(0, 255, (len(y), 8, 8), np.uint8), y) for name, y in sites.items()}
    return fn.from_arrays(made, list(classes), val=val, test=0.0, layout="NHW")


def test_five_images_are_too_few():
    with pytest.raises(fn.BadInput, match="at least 10"):
        advise(images({"x": np.array([0, 1, 0]), "y": np.array([0, 1])}), **SMALL)


def test_one_class_or_one_site_is_nothing_to_choose():
    with pytest.raises(fn.BadInput, match="only one class"):
        advise(images({"x": np.zeros(40, int), "y": np.zeros(40, int)}, ["a"]), **SMALL)
    with pytest.raises(fn.BadInput, match="only one site"):
        advise(images({"x": np.arange(80) % 2}), **SMALL)


def test_missing_classes_and_no_validation_split_are_said():
    data = images({"x": np.arange(60) % 2, "y": np.zeros(60, int)})
    advice = advise(data, **SMALL | {"seeds": 1})
    assert any("held out" in note for note in advice.notes)
    assert any("y lacks b" in note for note in advice.notes)
    held, _ = for_validation(data)
    for before, after in zip(data.clients, held.clients, strict=True):
        assert len(before.train) == len(after.train) + len(after.val)


def test_groups_stay_together_when_validation_is_held_out():
    y = np.arange(60) % 2
    patients = np.arange(60) // 6
    made = {"x": (np.zeros((60, 8, 8), np.uint8), y), "y": (np.zeros((60, 8, 8), np.uint8), y)}
    data = fn.from_arrays(made, ["a", "b"], val=0.0, test=0.0, layout="NHW", groups={"x": patients, "y": patients})
    for site in for_validation(data)[0].clients:
        assert not set(site.train.groups) & set(site.val.groups)


def question(**changes):
    return replace(Question("cnn-small", classes=10, shape=(3, 8, 8), sites=4, rounds=8), **changes)


@pytest.mark.parametrize(
    ("changes", "out", "said"),
    [
        ({"wanted": "one-model"}, {"fedbn", "fedbn + fedfn", "ditto", "standalone"}, "one model"),
        ({"unseen": 2}, {"fedbn", "fedbn + fedfn", "ditto", "standalone"}, "without training data"),
        (
            {"batch_size": 1},
            {"fedavg", "fedbn", "fedbn + fedfn", "scaffold", "fedadam", "ditto", "standalone"},
            "one image",
        ),
        ({"expected": 0.5}, {"fedbn", "fedbn + fedfn", "scaffold", "ditto", "standalone"}, "takes part"),
        ({"pretrained": True}, {"fedwon + fedfn"}, "published weights"),
        ({}, set(), ""),
    ],
)
def test_what_cannot_work_is_left_out_with_a_sentence(changes, out, said):
    found = propose(question(**changes), {})
    assert out <= set(found.excluded)
    assert all(said in found.excluded[name] for name in out)
    assert not set(found.excluded) & {arm.name for arm in found.arms}
    assert {arm.name for arm in found.arms} | set(found.excluded) >= {c.name for c in CANDIDATES}


def test_fedbn_without_batch_normalization_is_left_out():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10))
    assert "fedbn" in propose(question(model=model), {}).excluded


def test_priors_prefer_what_won_on_similar_federations():
    near = {"data": "a", "measures": {"label_tv": 0.9, "images": 50}, "lost": {"x": 0.0, "y": 9.0}}
    far = {"data": "b", "measures": {"label_tv": 0.0, "images": 5000}, "lost": {"x": 9.0, "y": 0.0}}
    expected = expected_loss({"label_tv": 0.8, "images": 60, "gradient_b2": None}, [near, far])
    assert expected["x"] < 1 < expected["y"]
    assert expected_loss({}, []) == {}
    names = {c.name for c in CANDIDATES}
    assert all(set(record["lost"]) <= names for record in records())


def test_options_of_parts():
    assert with_options("fedprox + fedavgm", {"mu": 0.5, "fedavgm.lr": 2.0}) == "fedprox(mu=0.5) + fedavgm(lr=2.0)"
    with pytest.raises(fn.BadInput, match="nu"):
        with_options("fedprox", {"nu": 1})
    with pytest.raises(fn.BadInput, match="several parts"):
        with_options("fedavgm + fedadam", {"lr": 1.0})


def test_names_of_trials_differ_with_their_values():
    assert Trial("a", "a", {"lr": 0.1}).name != Trial("a", "a", {"lr": 0.10001}).name
