"""FRAug, reduced: synthetic features for the head."""

import math

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.core.views import Step
from fednorms.methods.fraug import kernel_discrepancy
from fednorms.methods.registry import method
from tests.methods.test_moon import features
from tests.reference.fraug import one_step
from tests.support.tiny import plan_of, play, rounds, tiny_data, tiny_net, tiny_task


def class_means(model, split, classes=3):
    model = model.eval()
    with torch.no_grad():
        f = features(model, split.x)
    return torch.stack(
        [f[split.y == c].mean(0) if (split.y == c).any() else torch.zeros(16).double() for c in range(classes)]
    )


@pytest.mark.parametrize("gamma", [0.01, 0.5])
def test_one_step_is_three_separate_gradients(monkeypatch, gamma):
    data, lr, factor = tiny_data(12), 0.1, 2.0
    z = torch.rand(12, 6, dtype=torch.float64)
    monkeypatch.setattr(Step, "uniform", lambda self, *shape: z)
    text = f"fraug(latent=6, gamma={gamma}, lam_g=0.5, lam_ft=2.0, factor={factor})"
    task = tiny_task(text, data, batch_size=12, lr=lr)
    run = rounds(task, data, 1)
    (rows,) = plan_of(task, data["a"], "a", 0)
    model, start = tiny_net(), task.net.initial
    means, ratio = class_means(tiny_net(), data["a"]), math.exp(gamma * (0 - 4))
    x, y = data["a"].x[rows], data["a"].y[rows]
    body, generator, private = one_step(model, features, start, x, y, z, means, ratio, 0.5, 2.0)
    after = {**run.model, **run.states["a"].local}
    for name, g in body.items():
        torch.testing.assert_close(after[name], start[name] - lr * g, atol=1e-10, rtol=0)
    for prefix, grads in (("fraug.generator.", generator), ("fraug.local.", private)):
        for name, g in grads.items():
            wanted = start[prefix + name] - lr * factor * g
            torch.testing.assert_close(after[prefix + name], wanted, atol=1e-10, rtol=0)


def test_routes_generator_shared_the_rest_private():
    task = tiny_task("fraug", tiny_data())
    local = {n for n, r in task.net.routes.items() if r is Route.LOCAL}
    assert {n for n in local if not n.startswith("fraug.local.")} == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    run = play("fraug", n=2)
    sent = run.uploads["a"].model
    assert any(n.startswith("fraug.generator.") for n in sent)
    assert not any(n.startswith("fraug.local.") for n in sent)


def test_class_means_follow_with_momentum_and_the_ratio_grows():
    data = tiny_data()
    task = tiny_task("fraug(momentum=0.25, gamma=0.5)", data, lr=0.0)
    one = rounds(task, data, 1)
    two = rounds(task, data, 1, run=one)
    a, b = (r.states["a"].parts["fraug"] for r in (one, two))
    torch.testing.assert_close(a["means"], class_means(tiny_net(), data["a"]), atol=1e-12, rtol=0)
    assert [float(t["ratio"]) for t in (a, b)] == pytest.approx([math.exp(-2.0), math.exp(-1.5)])
    model = tiny_net()
    model.load_state_dict({k: v for k, v in {**one.model, **one.states["a"].local}.items() if k in model.state_dict()})
    wanted = 0.75 * a["means"] + 0.25 * class_means(model, data["a"])
    torch.testing.assert_close(b["means"], wanted, atol=1e-12, rtol=0)


def test_the_discrepancy_is_zero_for_equal_batches_and_positive_for_far_ones():
    x = torch.randn(8, 3, dtype=torch.float64)
    assert abs(kernel_discrepancy(x, x)) < 1e-12
    assert kernel_discrepancy(x, x + 5) > 0.5
    assert torch.isfinite(kernel_discrepancy(torch.zeros(4, 2), torch.zeros(4, 2)))


def test_mmd_trains_and_a_batch_of_one_is_plain():
    run = play("fraug(distance=mmd, lam_g=10.0)", tiny_data(9, 5), n=3, batch_size=4)
    assert run.model.finite()


def test_tests_do_not_depend_on_the_extra_networks():
    row = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    net = Net(row, method("fraug"))
    x = torch.rand(5, 3, 2, 2)
    assert net.heads == ["3"]
    assert torch.equal(net.forward(net.initial, x, train=False, batch_statistics=False)[0], row(x))


@pytest.mark.parametrize("text", ["fedfn + fraug", "fedbabu + fraug"])
def test_needs_a_plain_classifier_that_trains(text):
    with pytest.raises(BadInput, match="classifier"):
        tiny_task(text, tiny_data())
