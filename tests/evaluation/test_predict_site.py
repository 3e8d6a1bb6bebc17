"""What engines predict agrees with what they score, also for the averaged model of personal methods."""

import numpy as np
import pytest
import torch

import fednorms as fn
from fednorms.core.part import Route
from fednorms.evaluation.modes import Mode, averages
from fednorms.runs.use.open import open_run


def trained(folder, method):
    recipe = fn.Recipe(method=method, rounds=2, data={"hold_out": ["poster"], "size": 8})
    fn.run(recipe=recipe, out=folder / method)
    return folder / method


@pytest.fixture(scope="module")
def fedbn(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "fedbn")


@pytest.fixture(scope="module")
def fedap(tmp_path_factory):
    """Its clients also receive different models."""
    return trained(tmp_path_factory.mktemp("run"), "fedap(lam=0.9)")


@pytest.mark.parametrize("mode", ["personal", "personal/batch", "personal/re-estimated", "averaged", "unseen"])
@pytest.mark.parametrize("run", ["fedbn", "fedap"])
def test_predictions_have_the_accuracy_of_the_scores(run, mode, request):
    opened = open_run(request.getfixturevalue(run))
    engine, read = opened.session.engine, Mode.read(mode)
    scores = engine.evaluate(opened.state, read, opened.cohort)
    said = engine.predict(opened.state, read, opened.cohort)
    assert set(said) == set(scores.sites)
    for site, p in said.items():
        assert (p.labels == opened.session.federation.site(site).test.y.numpy()).all()
        assert (p.probabilities.argmax(1) == p.labels).mean() == pytest.approx(scores.sites[site].accuracy)
        assert -np.log(p.probabilities[np.arange(len(p)), p.labels]).mean() == pytest.approx(scores.sites[site].loss)


@pytest.mark.parametrize("run", ["fedbn", "fedap"])
def test_the_averaged_model_is_the_mean_of_what_clients_keep_at_every_site(run, request):
    opened = open_run(request.getfixturevalue(run))
    assert averages(opened.task)
    scores = opened.session.engine.evaluate(opened.state, Mode.read("averaged"), opened.cohort)
    assert scores.label == "averaged/global"
    assert set(scores.sites) == {s.name for s in opened.facts.sites}
    kept = [
        n for n, r in opened.task.net.routes.items() if r is Route.LOCAL and opened.state.model[n].is_floating_point()
    ]
    states = [opened.clients[name].local for name in opened.facts.clients]
    handed_out = opened.choose(averaged=True).tensors
    for name in kept:
        mean = torch.stack([s[name].double() for s in states]).mean(0)
        assert torch.allclose(handed_out[name].double(), mean, atol=1e-6)
    # The same tensors by hand at one site give the same accuracy.
    site = opened.session.federation.site("clean")
    module = opened.task.net.plain(handed_out)
    with torch.no_grad():
        right = module(opened.facts.preprocessing(site.test.x[:])).argmax(1) == site.test.y
    assert float(right.double().mean()) == pytest.approx(scores.sites["clean"].accuracy)


def test_a_personal_model_is_judged_on_other_data_as_it_is_handed_out(fedap):
    opened = open_run(fedap)
    data, preprocessing = opened.session.federation, opened.facts.preprocessing
    for site, whose in ((None, None), ("clean", "clean")):
        found = fn.judge(fedap, data, ["personal"], site=site)["personal/own/test"].sites
        assert found
        for name, judged in found.items():
            images = data.site(name).test
            module = opened.task.net.plain(opened.choose(whose or name).tensors)
            with torch.no_grad():
                right = module(preprocessing(images.x[:])).argmax(1) == images.y
            assert judged.accuracy.value == pytest.approx(float(right.double().mean()))


def test_a_method_with_a_global_model_has_no_averaged_one(tmp_path):
    fn.run("fedavg", rounds=1, out=tmp_path / "run")
    with pytest.raises(fn.BadInput, match=r'has a global model.*Evaluate "global"'):
        fn.evaluate_run(tmp_path / "run", ["averaged"])


def test_a_personal_method_names_the_averaged_model_where_a_global_one_is_asked_for(fedbn):
    with pytest.raises(fn.BadInput, match=r'has no global model.*"averaged" for the mean over clients'):
        fn.evaluate_run(fedbn, ["global"])
    with pytest.raises(fn.BadInput, match="no site that trained"):
        fn.evaluate_run(fedbn, ["averaged/own"])
