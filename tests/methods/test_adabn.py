"""AdaBN: the same training as without it, tested with statistics of the site's own images."""

import pytest

from fednorms.core.errors import BadInput
from fednorms.evaluation.modes import Mode
from fednorms.methods.registry import method
from tests.support.after import trained
from tests.support.tiny import play, same, tiny_data, tiny_task


@pytest.mark.parametrize("host", ["fedavg", "silobn", "fedbn", "fednn", "sn", "rbn", "fbn", "hbn", "mixbn"])
def test_training_is_that_of_the_host_and_the_test_re_estimates(host):
    session, state = trained(f"{host} + adabn" if host != "fedavg" else "adabn")
    plain, other = trained(host)
    assert same(state.model, other.model)
    kind = session.headline.model
    assert session.headline == Mode(kind, "re-estimated")
    scores = session.engine.evaluate(state, Mode(kind), "abc")
    assert scores.sites == plain.engine.evaluate(other, Mode(kind, "re-estimated"), "abc").sites
    unseen = session.engine.evaluate(state, Mode("unseen"), "abc")
    assert unseen.sites == plain.engine.evaluate(other, Mode("unseen", "re-estimated"), "abc").sites


def test_other_statistics_can_still_be_asked_for():
    session, state = trained("adabn")
    scores = session.engine.evaluate(state, Mode.read("global/global"), "abc")
    plain, other = trained("fedavg")
    assert scores.sites == plain.engine.evaluate(other, Mode("global"), "abc").sites


def test_a_model_that_adapts_keeps_the_statistics_it_adapted_to():
    task = tiny_task("adabn + finetune", tiny_data())
    assert Mode("adapted").resolved(task).statistics == "own"
    assert Mode("after_local").resolved(task).statistics == "own"


def test_models_are_bit_for_bit_those_of_fedavg():
    assert same(play("adabn").model, play("fedavg").model)


def test_a_model_without_running_statistics_is_refused():
    with pytest.raises(BadInput, match=r"adabn has nothing to act on.*running statistics"):
        tiny_task("gn(groups=2) + adabn", tiny_data())
    assert method("adabn").evaluation().statistics == "re-estimated"
