"""FineTune: changes tests, never training."""

from dataclasses import replace

import pytest
import torch

from fednorms.core import noise
from fednorms.core.batches import batch_plan
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.part import REGISTRY, Part, Phase, part
from fednorms.core.round import begin, broadcast, train
from fednorms.core.states import Client
from fednorms.core.training import Training
from tests.reference import fedavg
from tests.support.tiny import close, rounds, same, tiny_data, tiny_net, tiny_task


def adapted(text, data, run_rounds=2, **settings):
    task = tiny_task(text, data, **settings)
    run = rounds(task, data, run_rounds)
    client = Client("b", data["b"], run.states["b"])
    carry, _ = begin(task, broadcast(task, run.server), client, evaluating=True)
    train(task, carry, task.method.evaluation().phases)
    return run, carry


def test_training_is_untouched_bit_for_bit():
    data = tiny_data()
    run, _ = adapted("finetune", data)
    assert same(run.model, rounds(tiny_task("fedavg", data), data, 2).model)


def test_equals_plain_training_on_a_copy_of_the_server_model():
    data = tiny_data()
    run, carry = adapted("finetune(epochs=2, factor=0.5)", data, lr=0.2)
    seed = noise.seed_of("adapt", 0, 2, "b", 0)
    rows = batch_plan(7, Training(batch_size=4), Phase(epochs=2), seed)[0]
    model = tiny_net()
    model.load_state_dict(run.model)
    fedavg.train(model, data["b"].x, data["b"].y, rows, lr=0.1)
    close(carry.model(), model.state_dict())


@pytest.mark.parametrize(("option", "decay"), [("", 0.0), (", weight_decay=0.3", 0.3)])
def test_fine_tuning_has_its_own_weight_decay(option, decay):
    data = tiny_data()
    run, carry = adapted(f"finetune(epochs=2{option})", data, lr=0.2, weight_decay=0.05)
    rows = batch_plan(7, Training(batch_size=4), Phase(epochs=2), noise.seed_of("adapt", 0, 2, "b", 0))[0]
    model = tiny_net()
    model.load_state_dict(run.model)
    fedavg.train(model, data["b"].x, data["b"].y, rows, lr=0.02, weight_decay=decay)
    close(carry.model(), model.state_dict())


def test_a_phase_of_training_has_the_recipes_weight_decay():
    @part("decaying")
    class Decaying(Part):
        def plan(self, phases, c):
            return [replace(phase, weight_decay=0.1) for phase in phases]

    data = tiny_data()
    try:
        with pytest.raises(BadInput, match="only phases of `evaluation` may"):
            rounds(tiny_task(Method((Decaying(),)), data), data, 1)
    finally:
        REGISTRY.pop("decaying")


def test_rate_zero_gives_back_the_global_model():
    run, carry = adapted("nonorm + finetune(factor=0)", tiny_data())
    assert same(carry.model(), run.model)


def test_the_rate_is_the_recipes_first_one_times_the_factor():
    _, carry = adapted("finetune(factor=0.1)", tiny_data(), schedule="exp", decay=0.5, lr=0.4)
    assert float(carry.optimizer.lr) == pytest.approx(0.04)


@pytest.mark.parametrize(("which", "moves"), [("head", {"head."}), ("body", {"conv.", "norm."})])
def test_only_the_chosen_tensors_move(which, moves):
    run, carry = adapted(f"finetune(train={which})", tiny_data())
    params = [n for n, _ in tiny_net().named_parameters()]
    moved = {n for n in params if not torch.equal(carry.model()[n], run.model[n])}
    assert moved == {n for n in params if n.startswith(tuple(moves))}


def test_a_personal_method_is_adapted_from_the_clients_own_model():
    data = tiny_data()
    run, carry = adapted("fedbn + finetune(factor=0)", data)
    assert torch.equal(carry.model()["norm.weight"], run.states["b"].local["norm.weight"])


def test_the_adaptation_is_the_same_whoever_was_adapted_before():
    data = tiny_data()
    _, one = adapted("finetune", data)
    _, two = adapted("finetune", data)
    assert same(one.model(), two.model())
