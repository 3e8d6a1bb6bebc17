"""The settings of local training: schedules, what has no effect, what is refused."""

import math

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.training import Training
from tests.support.tiny import close, play, tiny_data, tiny_net


def test_settings_that_do_nothing_are_noted():
    assert Training().without_effect == Training(schedule="exp", decay=0.9, momentum=0.9, epochs=3).without_effect == []
    idle = Training(decay=0.9, optimizer="adamw", momentum=0.5, steps=4, epochs=2)
    assert [note.split()[0] for note in idle.without_effect] == ["decay", "momentum", "epochs"]
    result = fn.run("fedavg", rounds=1, training=Training(decay=0.9))
    assert result.notes == ["decay 0.9 has no effect: the schedule is const"]


# -- schedules --------------------------------------------------------------------------------------------------
def test_schedules_by_their_formulas():
    rounds = 200
    for t in (0, 1, 99, 100, 149, 150, 199):
        assert Training(lr=0.1).rate(t, rounds) == 0.1
        assert Training(lr=0.1, schedule="exp").rate(t, rounds) == pytest.approx(0.1 * 0.998**t)
        cut = 1 if t < 100 else 0.1 if t < 150 else 0.01
        assert Training(lr=0.1, schedule="step").rate(t, rounds) == pytest.approx(0.1 * cut)
        wave = 0.05 * (1 + math.cos(math.pi * t / rounds))
        assert Training(lr=0.1, schedule="cosine").rate(t, rounds) == pytest.approx(wave)


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 320])
def test_the_step_schedule_cuts_at_half_and_three_quarters_rounded_down(rounds):
    rates = [Training(lr=1.0, schedule="step").rate(t, rounds) for t in range(rounds)]
    wanted = [0.1 ** ((t >= rounds // 2) + (t >= 3 * rounds // 4)) for t in range(rounds)]
    assert rates == pytest.approx(wanted)


def test_the_rate_is_constant_inside_a_round_and_in_force_in_it():
    data = tiny_data(4)
    run = play("nonorm", data, n=2, schedule="exp", decay=0.5, lr=0.2)
    model = tiny_net()
    model.norm = torch.nn.Identity()
    for rate in (0.2, 0.1):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(data["a"].x), data["a"].y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    close(run.model, model.state_dict(), atol=1e-12)


# -- refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"lr": -0.1}, "lr must be a finite number >= 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": float("inf")}, "lr must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"decay": 0.0}, "decay must be"),
        ({"clip": 0.0}, "clip must be"),
        ({"steps": 0}, "steps must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"optimizer": "adamw", "keep_momentum": True}, "keep_momentum must be false with adamw"),
        ({"epochs": 0, "lr": -1.0}, "epochs must be .*; lr must be"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        Training(**settings)
