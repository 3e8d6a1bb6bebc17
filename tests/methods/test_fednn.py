"""FedNN = wn + agn, and its ablations."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core.part import Route
from fednorms.core.round import broadcast, initial_state, load, own_state, server_update
from fednorms.core.states import Client, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.methods.registry import method
from tests.reference.layers_reference import weight_norm
from tests.support.tiny import client_model, play, rounds, same, tiny_data, tiny_net, tiny_task


def tau_of(task, t, evaluating=False):
    """The temperature that a client of round t, or a test when t rounds are done, installs."""
    sent = broadcast(task, replace(initial_state(task), round=t))
    client = Client("a", tiny_data()["a"])
    context = context_of(task, t, client, evaluating=evaluating)
    return float(load(task, sent, client, context, own_state(task, sent, None))["norm.tau"])


def test_fednn_is_the_sum_of_its_parts():
    assert method("fednn") == method("wn + agn")
    assert str(method("fednn(tau=3, groups=1, variant=author)")) == (
        "wn(variant='author') + agn(tau=3.0, groups=1, variant='author')"
    )


def test_the_temperature_schedule():
    task = tiny_task("fednn", tiny_data(), rounds=200)
    for t, wanted in [(0, 5.000025), (1, 4.975025), (199, 0.025025)]:
        assert tau_of(task, t) == pytest.approx(wanted, abs=1e-12)
    for t in (1, 100, 200):  # a test after a round keeps the temperature that round trained with
        assert tau_of(task, t, evaluating=True) == tau_of(task, t - 1)
    assert tau_of(tiny_task("agn(tau=3)", tiny_data(), rounds=10), 5) == pytest.approx(3 * 5.001 / 10)


def test_the_temperature_is_owned_never_averaged():
    run = play("fednn", n=2)
    task = tiny_task("fednn", tiny_data())
    assert task.net.routes["norm.tau"] is Route.OWNED
    assert "norm.tau" not in run.uploads["a"].model
    assert torch.equal(run.model["norm.tau"], task.net.initial["norm.tau"])


def test_a_users_own_parameter_called_tau_is_trained_like_any_other():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_net()
            self.tau = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.inner(self.tau * x)

    data = tiny_data(6)
    task = tiny_task("agn", data, model=Tempered())
    run = rounds(task, data, 1)
    assert float(client_model(task, data, run, "a")["tau"]) == float(run.uploads["a"].model["tau"])
    assert abs(float(run.model["tau"]) - 2.0) < 1.0


def test_logits_are_sent_and_their_gradient_sums_to_zero():
    # One plain step from (1, 1): the pair moves by equal and opposite amounts, because softmax ignores a constant.
    run = play("fednn", tiny_data(6), n=1, steps=1)
    moved = run.uploads["a"].model["norm.logits"] - 1.0
    assert moved.abs().min() > 0
    assert abs(float(moved.sum())) < 1e-12


def test_what_is_stored_is_the_raw_filter_and_what_is_used_is_standardized():
    data = tiny_data(6)
    task = tiny_task("wn", data)
    model = tiny_net()
    raw = model.conv.weight.detach().clone()
    assert torch.equal(task.net.initial["conv.weight"], raw)
    model.conv.weight.data = torch.from_numpy(weight_norm(raw.numpy(), "paper", 1e-5))
    wanted = model(data["a"].x)
    got, _ = task.net.forward(task.net.initial.clone(), data["a"].x, train=True, batch_statistics=True)
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)


def test_filters_that_differ_by_scale_and_shift_average_to_the_same_function():
    data = tiny_data(6)
    task = tiny_task("wn", data)
    theta = task.net.initial.clone()
    mean = task.net.initial.clone()
    mean["conv.weight"] = (theta["conv.weight"] + 3 * theta["conv.weight"] + 2) / 2
    outs = [task.net.forward(t, data["a"].x, train=False, batch_statistics=False)[0] for t in (theta, mean)]
    # The small number inside the root breaks the invariance by about eps / variance.
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("text", "tensors"),
    [
        ("wn", {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
        ("wn + nonorm", set()),
        ("wn + gn(groups=2)", set()),
        ("agn", {"norm.running_mean", "norm.running_var", "norm.tau"}),
        ("fednn", {"norm.running_mean", "norm.running_var", "norm.tau"}),
    ],
)
def test_ablations_train(text, tensors):
    run = play(text, n=2)
    task = tiny_task(text, tiny_data())
    assert set(task.net.buffers) == tensors
    assert run.model.finite()
    assert not torch.equal(run.model["conv.weight"], tiny_net().conv.weight)


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_evaluation_is_deterministic_and_sampling_is_not(mode):
    x = tiny_data()["a"].x

    def twice(text):
        task = tiny_task(text, tiny_data())
        return [task.net.forward(task.net.initial.clone(), x, train=False, batch_statistics=False)[0] for _ in range(2)]

    assert torch.equal(*twice(f"agn(eval_mode={mode})"))
    assert not torch.equal(*twice("agn(eval_mode=sample)"))


def test_gumbel_noise_is_keyed_so_a_round_repeats_bit_for_bit():
    torch.manual_seed(1)
    one = play("fednn", n=2)
    torch.manual_seed(2)
    assert same(one.model, play("fednn", n=2).model)
    assert not same(one.model, play("fednn", n=2, seed=5).model)


def test_running_statistics_are_slow():
    data = tiny_data(6)
    run = play("agn", data, n=1, batch_size=6, lr=0.0)
    h = tiny_net().conv(data["a"].x).detach()
    torch.testing.assert_close(run.model["norm.running_mean"], 0.003 * h.mean((0, 2, 3)), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        run.model["norm.running_var"], 0.997 + 0.003 * h.var((0, 2, 3), unbiased=False), atol=1e-12, rtol=0
    )


def chosen_by(task, choices):
    """The server's choice after a round in which clients of 1, 2, 3 ... images sent these."""
    start = initial_state(task)
    sent = []
    for k, c in enumerate(choices):
        model = Tree({**start.model.pick(task.net.exchanged), "norm.choice": torch.tensor(c).double()})
        sent.append(Upload(f"c{k}", k + 1.0, model, {}, {}))
    return server_update(task, start, sent).model["norm.choice"].tolist()


def test_the_global_model_is_frozen_only_where_all_participants_are():
    task = tiny_task("fednn(freeze_on_saturation=true)", tiny_data())
    assert chosen_by(task, [(0.0, 0.0)] * 3) == [0.0, 0.0]
    assert chosen_by(task, [(1.0, 0.0)] * 7) == pytest.approx([1.0, 0.0])
    assert chosen_by(task, [(1.0, 0.0), (0.0, 1.0)]) == pytest.approx([1 / 3, 2 / 3])
    assert chosen_by(task, [(1.0, 0.0), (0.0, 0.0), (1.0, 0.0)]) == [0.0, 0.0]


def test_without_saturation_freezing_changes_nothing():
    one, other = play("fednn", n=2), play("fednn(freeze_on_saturation=true)", n=2)
    assert same(other.model.pick(one.model), one.model)
    assert not other.model["norm.choice"].any()
    assert "norm.choice" not in one.model


def test_a_frozen_layer_stays_frozen_and_its_logits_do_not_learn():
    data = tiny_data(9)
    task = tiny_task("fednn(tau=0.01, freeze_on_saturation=true)", data)
    one = rounds(task, data, 1)
    two = rounds(task, data, 1, run=one)
    assert sorted(one.model["norm.choice"].tolist()) == [0.0, 1.0]
    assert torch.equal(two.model["norm.choice"], one.model["norm.choice"])
    assert torch.equal(two.model["norm.logits"], one.model["norm.logits"])
    assert not torch.equal(two.model["norm.weight"], one.model["norm.weight"])


def test_keep_and_eps_reach_the_layers():
    layer = tiny_task("agn(keep=0.5, eps=0.01)", tiny_data()).net.module.norm
    assert (layer.keep, layer.eps) == (0.5, 0.01)
    assert tiny_task("fednn(keep=0.5)", tiny_data()).net.module.norm.keep == 0.5
