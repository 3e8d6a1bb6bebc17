"""FedIIR: gradients of the classifier that agree."""

import pytest
import torch
from torch import nn

from fednorms.core.batches import batch_plan
from fednorms.core.errors import BadInput
from fednorms.core.noise import seed_of
from fednorms.core.part import Phase
from tests.reference.fediir import fediir
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def measured_on(task, data, t):
    """The batches of the pass before training."""
    found = []
    for name, split in data.items():
        word = seed_of("noise of a pass", task.seed, t, name, "fediir") & 0xFFFFFFFF
        plan = batch_plan(len(split), task.training, Phase(), seed_of("pass", word, 0), needs_two=task.needs_two)[0]
        found.append([(split.x[rows], split.y[rows]) for rows in plan])
    return found


@pytest.mark.parametrize(("penalty", "ema"), [(0.5, 0.9), (0.1, 0.0)])
def test_equals_a_plain_torch_loop_over_four_rounds_with_absences(penalty, ema):
    """The authors' update, given this round's mean gradient, differs by at most 1e-16 over three rounds."""
    data, cohorts = tiny_data(), ["abc", "ac", "b", "abc"]
    task = tiny_task(f"fediir(penalty={penalty}, ema={ema})", data)
    run = rounds(task, data, 4, cohorts=cohorts)
    plans = [[plan_of(task, s, k, t) if k in cohorts[t] else None for k, s in data.items()] for t in range(4)]
    measured = [measured_on(task, data, t) for t in range(4)]
    model, mean = fediir(tiny_net(), pairs(data), plans, measured, 0.1, penalty, ema)
    close(run.model, model.state_dict(), atol=1e-9)
    close(run.server.parts["fediir"], dict(zip(("head.weight", "head.bias"), mean, strict=True)), atol=1e-10)


def test_without_penalty_it_is_fedavg_bit_for_bit():
    assert same(play("fediir(penalty=0)", n=3).model, play("fedavg", n=3).model)
    assert not same(play("fediir", n=1).model, play("fedavg", n=1).model)


def test_the_mean_is_the_servers_own_gradient_if_every_client_is_one_batch():
    data = tiny_data(4, 4)
    run = play("fediir(ema=0)", data, n=1, batch_size=4)
    model, total = tiny_net().train(), 0
    for split in data.values():
        total = total + nn.functional.cross_entropy(model(split.x), split.y) / 2
    g = torch.autograd.grad(total, list(model.head.parameters()))
    close(run.server.parts["fediir"], dict(zip(("head.weight", "head.bias"), g, strict=True)))


@pytest.mark.parametrize("other", ["fedper", "fedbabu", "standalone"])
def test_needs_a_classifier_that_is_sent(other):
    with pytest.raises(BadInput, match="fediir"):
        tiny_task(f"fediir + {other}", tiny_data())


@pytest.mark.parametrize(
    "text", ["{}", "fedlc + {}", "fedrod + {}", "{} + fedlc", "{} + fedrod", "{} + fedlc + scaffold"]
)
def test_gradients_of_the_same_loss_at_the_same_model_do_not_differ(text):
    def loss(penalty, n):  # of a single client whose model stays where it is
        chosen = text.format(f"fediir(penalty={penalty}, ema=0)")
        return float(play(chosen, tiny_data(9), n=n, batch_size=9, lr=1e-14).uploads["a"].metrics["loss"])

    assert loss(0.5, 1) > loss(0, 1) + 0.01  # the mean starts at 0
    assert loss(0.5, 2) == pytest.approx(loss(0, 2), abs=1e-9)
