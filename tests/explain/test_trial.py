"""The trial run behind `describe` and `what_leaves`."""

import torch
from torch import nn

import fednorms as fn
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
