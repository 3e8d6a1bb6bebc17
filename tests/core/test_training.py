"""The settings of local training: schedules, what has no effect, what is refused."""

import math
from dataclasses import replace

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.states import context_of
from fednorms.core.training import Training
from tests.support.tiny import close, play, same, tiny_data, tiny_net, tiny_task


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


def test_a_warm_up_grows_to_the_schedules_rate_and_leaves_the_first_rate_to_fine_tuning():
    rounds = 100
    for name in ("const", "exp", "step", "cosine"):
        plain, warm = Training(lr=0.1, schedule=name), Training(lr=0.1, schedule=name, warmup=4)
        shares = [warm.rate(t, rounds) / plain.rate(t, rounds) for t in range(6)]
        assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    task = tiny_task("fedavg", tiny_data(), lr=0.1, warmup=3)
    assert (context_of(task, 0, None).lr, context_of(task, 0, None).lr_0) == (0.025, 0.1)


def test_factors_of_a_custom_schedule_multiply_the_rate():
    task = tiny_task("fedavg", tiny_data(), lr=0.1, schedule="custom:f@12", warmup=1)
    task = replace(task, factors=(1.0, 0.5, 0.25))
    assert [task.rate(t) for t in range(4)] == pytest.approx([0.05, 0.05, 0.025, 0.025])  # tests may ask beyond


# -- epochs of single clients -----------------------------------------------------------------------------------
def test_a_client_may_train_for_more_epochs_than_the_others():
    data = tiny_data(8, 8)
    run = play("fedavg", data, n=1, epochs=2, client_epochs={"b": 3})
    assert {name: int(u.metrics["steps"]) for name, u in run.uploads.items()} == {"a": 4, "b": 6}
    long, short = (play("fedavg", data, n=1, epochs=n).uploads for n in (3, 2))
    assert same(run.uploads["b"].model, long["b"].model)
    assert same(run.uploads["a"].model, short["a"].model)


def test_a_second_model_trains_as_long_as_the_first():
    run = play("ditto", tiny_data(8, 8), n=1, client_epochs={"b": 3})
    three = play("ditto", tiny_data(8, 8), n=1, epochs=3)
    assert same(run.states["b"].parts["ditto"], three.states["b"].parts["ditto"])
    assert not same(run.states["a"].parts["ditto"], three.states["a"].parts["ditto"])


# -- refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs= must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size= must be"),
        ({"lr": -0.1}, "lr= must be a finite number >= 0, got -0.1"),
        ({"lr": float("nan")}, "lr= must be"),
        ({"lr": float("inf")}, "lr= must be"),
        ({"momentum": 1.0}, "momentum= must be"),
        ({"decay": 0.0}, "decay= must be"),
        ({"clip": 0.0}, "clip= must be"),
        ({"steps": 0}, "steps= must be"),
        ({"weight_decay": -1.0}, "weight_decay= must be"),
        ({"optimizer": "adamw", "keep_momentum": True}, "keep_momentum= must be false with adamw"),
        ({"optimizer": "adam", "keep_momentum": True}, "keep_momentum= must be false with adam"),
        ({"optimizer": "adan"}, 'optimizer= must be sgd, adam or adamw, got "adan"'),
        ({"schedule": "warmup"}, "for a warm-up, set warmup"),
        ({"warmup": 0}, "warmup= must be an integer >= 1"),
        ({"client_epochs": {"a": 0}}, "client_epochs= must be integers >= 1"),
        ({"epochs": 0, "lr": -1.0}, "epochs= must be .*; lr= must be"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        Training(**settings)
