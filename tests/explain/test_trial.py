"""The trial run behind `describe` and `what_leaves`."""

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.core.round import broadcast, server_update
from fednorms.explain.leaves import what_leaves
from fednorms.explain.trial import IMAGES, NAMES, Trial


def small():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))


def test_a_trial_has_two_clients_and_does_not_change_the_given_model():
    model = small()
    before = [t.clone() for t in model.state_dict().values()]
    trial = Trial.of(fn.method("fedbn"), model, classes=3, shape=(1, 8, 8))
    trial.engine.train(trial.engine.test_broadcast(trial.state, []), NAMES)
    assert trial.engine.clients == NAMES
    assert trial.task.samples == 2 * IMAGES
    assert trial.task.net.name == "Sequential"
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_describe_takes_the_head_by_name():
    described = fn.describe("fedper", small(), classes=3, shape=(1, 8, 8), head="4")
    assert described.routes["4.weight"].name == "LOCAL"
    assert described.model_kept == 4 * (2 * 3 + 3)


def test_describe_and_what_leaves_agree_on_what_is_sent():
    described, privacy = fn.describe("scaffold + fedbn"), what_leaves("scaffold + fedbn")
    sent = sum(x.nbytes for x in privacy.leaving if x.when == "every round")
    assert sent == described.bytes_up
    assert privacy.secure_aggregation == described.averaged_only


def test_other_sites_receive_means_or_what_single_sites_sent():
    found = {name: what_leaves(name).received for name in ("standalone", "fedbn", "scaffold", "fedrdn", "hbn")}
    assert found["standalone"] == []
    assert [x.sender for x in found["fedbn"]] == ["model"]
    assert not any(name.startswith("norm") for name in found["fedbn"][0].names)
    assert {name: any(x.single for x in received) for name, received in found.items()} == {
        "standalone": False,
        "fedbn": False,
        "scaffold": False,
        "fedrdn": True,  # the pool of all sites' statistics
        "hbn": False,
    }


@pytest.mark.parametrize("text", ["mixheads", "fedap", "fedpac"])
def test_tensors_mixed_for_each_site_are_not_called_averaged(text):
    received = what_leaves(text).received
    own = [x for x in received if x.mixed]
    assert len(own) == 1
    assert all(set(own[0].names).isdisjoint(x.names) for x in received if x.sender == "model")
    if text != "fedap":
        assert set(own[0].names) == {"head.weight", "head.bias"}
    assert not own[0].single
    assert "mixed for it from single sites' models" in repr(what_leaves(text))


def test_with_two_sites_the_mean_gives_away_the_other_model():
    """What the privacy page warns of: a site knows its own model, its number of images and the total."""
    trial = Trial.of(fn.method("fedavg"), "cnn-small", 10)
    mine, other = trial.engine.train(broadcast(trial.task, trial.state), NAMES).uploads
    mean = server_update(trial.task, trial.state, [mine, other]).model
    for name in trial.task.net.sent_params:
        guessed = (2 * IMAGES * mean[name].double() - IMAGES * mine.model[name].double()) / IMAGES
        torch.testing.assert_close(guessed, other.model[name].double(), rtol=1e-4, atol=1e-5)
