"""MOON: near the received model, away from the last one."""

import math

import pytest
import torch

from fednorms.core.net import Net
from fednorms.methods.moon import contrast
from fednorms.methods.registry import method
from fednorms.models import build
from tests.reference.moon import contrast as slow_contrast
from tests.reference.moon import moon
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def features(model, x):
    return model.pool(torch.relu(model.norm(model.conv(x)))).flatten(1)


def test_equals_a_plain_torch_loop_over_four_rounds_with_absences():
    data, cohorts = tiny_data(), ["ab", "abc", "bc", "abc"]
    task = tiny_task("moon(mu=2.0)", data)
    run = rounds(task, data, 4, cohorts=cohorts)
    plans = [[plan_of(task, s, k, t) if k in cohorts[t] else None for k, s in data.items()] for t in range(4)]
    close(run.model, moon(tiny_net(), features, pairs(data), plans, 0.1, 2.0, 0.5).state_dict())


def test_the_contrast_at_two_known_points():
    z = torch.tensor([[1.0, 2.0]]).double()
    assert abs(contrast(z, 3 * z, -z, 0.5) - 0.018150) < 1e-6
    assert abs(contrast(z, z, 5 * z, 0.5) - math.log(2)) < 1e-12


def test_the_contrast_by_its_definition():
    z, a, b = torch.randn(3, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(contrast(z, a, b, 0.5), slow_contrast(z, a, b, 0.5), atol=1e-12, rtol=0)


def test_mu_zero_is_fedavg_bit_for_bit():
    assert same(play("moon(mu=0)", n=3).model, play("fedavg", n=3).model)


def test_the_first_participation_has_no_term():
    data = tiny_data()
    run, plain = (play(t, data, n=1) for t in ("moon(mu=5.0)", "fedavg"))
    assert same(run.model, plain.model)
    late = play("moon(mu=5.0)", data, n=2, cohorts=["a", "b"])
    assert same(late.uploads["b"].model, play("fedavg", data, n=2, cohorts=["a", "b"]).uploads["b"].model)
    assert not same(play("moon(mu=5.0)", data, n=2).model, play("fedavg", data, n=2).model)


def test_the_other_models_touch_no_statistics():
    # With a contrast that pulls on nothing (temperature huge), statistics are FedAvg's.
    one, plain = play("moon(temperature=1e12)", n=2), play("fedavg", n=2)
    torch.testing.assert_close(one.model["norm.running_mean"], plain.model["norm.running_mean"], atol=1e-9, rtol=0)
    assert torch.equal(one.model["norm.num_batches_tracked"], plain.model["norm.num_batches_tracked"])


def test_the_state_is_the_whole_last_model_and_never_leaves():
    run = play("moon", n=2)
    kept = run.states["a"].parts["moon"]
    assert {k.removeprefix("model/") for k in kept} == {*tiny_net().state_dict(), "seen/before"}
    for name, tensor in run.uploads["a"].model.items():
        assert torch.equal(kept[f"model/{name}"], tensor)
    assert not run.uploads["a"].parts.get("moon")


def test_with_fedbn_the_last_model_has_the_clients_own_norms():
    run = play("fedbn + moon(mu=1.0)", n=3)
    for name, tensor in run.states["a"].local.items():
        assert torch.equal(run.states["a"].parts["moon"][f"model/{name}"], tensor)


@pytest.mark.parametrize("name", ["cnn-small", "torchvision:resnet18"])
def test_the_projection_sits_between_features_and_classifier(name):
    model = build(name, classes=7, channels=3, size=32, seed=0)
    net = Net(model, method("moon(projection=6)"), name=name)
    (head,) = net.heads
    linear = net.module.get_submodule(head)
    assert (linear.in_features, linear.out_features) == (6, 7)
    logits, z = net.forward(net.initial, torch.zeros(2, 3, 32, 32), train=False, batch_statistics=False)
    assert logits.shape == (2, 7)
    assert z.shape == (2, 6)
    assert net.head_names == {f"{head}.weight", f"{head}.bias"}


def test_the_projection_is_a_function_of_the_model_and_differs_between_models():
    nets = [Net(tiny_net(seed), method("moon(projection=5)"), dtype=torch.float64) for seed in (0, 0, 1)]
    name = next(n for n in nets[0].initial if n not in tiny_net().state_dict() and n.endswith("weight"))
    assert torch.equal(nets[0].initial[name], nets[1].initial[name])
    assert not torch.equal(nets[0].initial[name], nets[2].initial[name])


def test_a_net_can_be_made_again_from_the_users_name_of_the_head():
    net = Net(tiny_net(), method("moon(projection=5) + fedfn"), dtype=torch.float64)
    assert net.user_heads == ["head"]
    again = Net(tiny_net(), method("moon(projection=5) + fedfn"), head=net.user_heads, dtype=torch.float64)
    assert again.heads == net.heads != ["head"]
    assert same(again.initial, net.initial)
