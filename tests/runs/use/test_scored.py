"""Nothing is handed out unscored: a mean of personal models is asked for, and every chosen model knows its scores."""

import pytest

import fednorms as fn
from fednorms.cli import main
from fednorms.evaluation.judge import accuracy_of
from fednorms.runs.use.open import open_run
from fednorms.runs.use.scored import scored

TINY = {"rounds": 1, "data": {"size": 8, "hold_out": ["poster"]}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, options in {
        "fedavg": {"method": "fedavg"},
        "fedbn": {"method": "fedbn"},
        "averaged": {"method": "fedbn", "evaluate": ["auto", "averaged"]},
        "unkept": {"method": "fedbn", "keep_predictions": False},
        "adabn": {"method": "fedavg + adabn"},
    }.items():
        fn.run(recipe=fn.Recipe.make(TINY | options), out=root / name)
    return root


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    from PIL import Image

    file = tmp_path_factory.mktemp("images") / "a.png"
    Image.new("RGB", (8, 8), "red").save(file)
    return file


def test_a_personal_method_hands_out_no_model_for_all_unless_asked(runs, image, tmp_path):
    for handed_out in (lambda: fn.predict(runs / "fedbn", image), lambda: fn.export(runs / "fedbn", tmp_path / "m")):
        with pytest.raises(fn.BadInput, match=r"no global model.*site=: clean.*averaged=True.*--modes averaged"):
            handed_out()
    assert not (tmp_path / "m").exists()
    with pytest.raises(fn.BadInput, match='no model for site "poster"'):
        fn.predict(runs / "fedbn", image, site="poster")
    assert fn.predict(runs / "fedbn", image, averaged=True)
    assert fn.predict(runs / "fedbn", image, site="poster", averaged=True)


def test_averaged_is_refused_where_there_is_nothing_to_average(runs, image):
    with pytest.raises(fn.BadInput, match="has a global model"):
        fn.predict(runs / "fedavg", image, averaged=True)
    with pytest.raises(fn.BadInput, match="has its own model"):
        fn.predict(runs / "fedbn", image, site="clean", averaged=True)


def test_the_command_line_names_its_own_options(runs, image, capsys):
    assert main(["predict", str(runs / "fedbn"), str(image)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--site: clean" in said
    assert "--averaged" in said
    assert main(["predict", str(runs / "fedbn"), str(image), "--averaged"]) == 0
    assert "Never scored" in " ".join(capsys.readouterr().err.split())


def test_a_site_knows_the_scores_of_its_own_model(runs):
    opened = open_run(runs / "fedbn")
    found = scored(opened, opened.choose("clean"))
    result = fn.evaluate_run(runs / "fedbn", ["personal"])["personal/own/test"]
    assert str(found.mode) == "personal/own"
    assert found.accuracy.value == pytest.approx(result.sites["clean"].accuracy)
    assert found.images == result.sites["clean"].samples
    assert found.judgement.pooled.accuracy == found.accuracy
    assert list(found.judgement.sites) == ["clean"]
    assert found.to_dict()["never_scored"] is None


def test_the_global_model_knows_the_scores_of_all_sites(runs):
    opened = open_run(runs / "fedavg")
    found = scored(opened, opened.choose())
    assert str(found.mode) == "global/global"
    assert set(found.scores.sites) == set(opened.facts.clients)
    assert found.accuracy.value == pytest.approx(found.scores.pooled)
    assert found.accuracy == accuracy_of(found.predictions) == found.judgement.pooled.accuracy


def test_the_averaged_model_was_never_scored_unless_it_was_tested(runs):
    opened = open_run(runs / "fedbn")
    found = scored(opened, opened.choose(averaged=True))
    assert str(found.mode) == "averaged/global"
    assert "--modes averaged/global" in found.never
    assert str(found).startswith("Never scored: ")
    assert found.to_dict()["accuracy"] is None
    opened = open_run(runs / "averaged")
    tested = scored(opened, opened.choose(averaged=True))
    assert not tested.never
    assert tested.accuracy.value == pytest.approx(tested.scores.pooled)


def test_without_kept_predictions_the_interval_is_wilsons(runs):
    opened = open_run(runs / "unkept")
    found = scored(opened, opened.choose("clean"))
    assert found.judgement is None
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high


def test_a_method_that_is_tested_with_measured_statistics_is_not_scored_with_averaged_ones(runs):
    opened = open_run(runs / "adabn")
    found = scored(opened, opened.choose())
    assert str(found.mode) == "global/global"
    assert 'the run has not tested "global/global"' in found.never


def test_an_exported_model_says_how_good_it_is_when_it_predicts(runs, image, tmp_path):
    for name, options in {"averaged": {"averaged": True}, "fedavg": {}, "adabn": {}}.items():
        fn.export(runs / name, tmp_path / name, **options)
        assert open_scores(runs / name, options) in fn.predict(tmp_path / name, image)[0].note


def open_scores(run, options):
    opened = open_run(run)
    return str(scored(opened, opened.choose(None, **options), exported=True))
