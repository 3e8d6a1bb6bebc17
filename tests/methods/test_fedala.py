"""FedALA: learned mixtures of a client's last layers and the received ones."""

import pytest
import torch

from fednorms.core.batches import batch_plan
from fednorms.core.errors import BadInput
from fednorms.core.noise import seed_of
from fednorms.core.part import Phase
from tests.reference.fedala import fedala
from tests.support.tiny import client_model, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

HEAD = ["head.weight", "head.bias"]


def learned_on(task, data, t, share):
    """The batches of a pass, as pairs of images and labels."""
    found = []
    for name, split in data.items():
        word = seed_of("noise of a pass", task.seed, t, name, "fedala") & 0xFFFFFFFF
        plan = batch_plan(len(split), task.training, Phase(), seed_of("pass", word, 0))[0]
        some = plan[: -(-int(share * 100 * len(plan)) // 100)]
        found.append([(split.x[rows], split.y[rows]) for rows in some])
    return found


@pytest.mark.parametrize(("names", "layers"), [(HEAD, 1), ([n for n, _ in tiny_net().named_parameters()], 0)])
def test_equals_a_plain_torch_loop(names, layers):
    data = tiny_data(12, 8)
    task = tiny_task(f"fedala(eta=2, share=0.5, layers={layers}, threshold=0.01)", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    batches = [learned_on(task, data, t, 0.5) for t in range(3)]
    server, weights = fedala(tiny_net(), pairs(data), plans, batches, 0.1, 2.0, names, threshold=0.01)
    run = rounds(task, data, 3)
    for i, k in enumerate(data):
        kept = {n.removeprefix("W/"): t for n, t in run.states[k].parts["fedala"].items() if n != "learned"}
        close(kept, weights[i])
        assert any((t < 1).any() for t in kept.values())
    close(run.model, server.state_dict())


def test_with_a_rate_of_zero_the_server_is_fedavgs():
    close(play("fedavg", n=3).model, play("fedala(eta=0)", n=3).model, atol=1e-12)


def test_the_first_round_is_fedavgs_bit_for_bit():
    assert same(play("fedavg", n=1).model, play("fedala", n=1).model)


def test_a_client_is_tested_with_its_mixture():
    data = tiny_data()
    task = tiny_task("fedala(eta=5)", data)
    run = rounds(task, data, 3)
    here, state = client_model(task, data, run, "a"), run.states["a"]
    for n in HEAD:
        w = state.parts["fedala"][f"W/{n}"]
        torch.testing.assert_close(here[n], state.local[n] + (run.model[n] - state.local[n]) * w)
    assert torch.equal(here["conv.weight"], run.model["conv.weight"])
    assert task.personal


@pytest.mark.parametrize("other", ["fedper", "fedbabu"])
def test_needs_a_layer_that_is_sent(other):
    with pytest.raises(BadInput, match="fedala"):
        tiny_task(f"fedala + {other}", tiny_data())
