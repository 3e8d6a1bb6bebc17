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
from tests.reference.fraug import one_step, stepped
from tests.support.tiny import close, plan_of, play, rounds, tiny_data, tiny_net, tiny_task


def class_means(model, split, classes=3):
    model = model.eval()
    with torch.no_grad():
        f = features(model, split.x)
    return torch.stack(
        [f[split.y == c].mean(0) if (split.y == c).any() else torch.zeros(16).double() for c in range(classes)]
    )


WAYS = {
    "plain": ({}, lambda p, lr: torch.optim.SGD(p, lr)),
    "decay": ({"weight_decay": 0.1}, lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1)),
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1)),
    "clip": ({"clip": 0.05}, lambda p, lr: torch.optim.SGD(p, lr)),
}


@pytest.mark.parametrize("gamma", [0.01, 0.5])
@pytest.mark.parametrize("way", WAYS)
def test_one_step_is_that_of_separate_optimizers(monkeypatch, way, gamma):
    data, lr, factor = tiny_data(12), 0.1, 2.0
    settings, make = WAYS[way]
    z = torch.rand(12, 6, dtype=torch.float64)
    monkeypatch.setattr(Step, "uniform", lambda self, *shape: z)
    text = f"fraug(latent=6, gamma={gamma}, lam_g=0.5, lam_ft=2.0, factor={factor})"
    task = tiny_task(text, data, batch_size=12, lr=lr, **settings)
    run = rounds(task, data, 1)
    (rows,) = plan_of(task, data["a"], "a", 0)
    model, start = tiny_net(), task.net.initial
    means, ratio = class_means(tiny_net(), data["a"]), math.exp(gamma * (0 - 4))
    x, y = data["a"].x[rows], data["a"].y[rows]
    body, generator, private = one_step(model, features, start, x, y, z, means, ratio, 0.5, 2.0)
    helpers = {f"fraug.generator.{k}": g for k, g in generator.items()}
    helpers |= {f"fraug.local.{k}": g for k, g in private.items()}
    after, clip = {**run.model, **run.states["a"].local}, settings.get("clip")
    wanted = stepped(start, body, make, lr, clip) | stepped(start, helpers, make, lr * factor, clip)
    # Adam divides by the gradient, and those of biases before a batch normalization are rounding errors.
    known = {k for k, g in (body | helpers).items() if g.norm() > 1e-12 or "adam" not in way}
    close({k: after[k] for k in known}, {k: wanted[k] for k in known}, atol=1e-9)


@pytest.mark.parametrize("settings", [{"optimizer": "adamw"}, {"clip": 0.01}])
def test_the_factor_moves_only_the_helping_networks(settings):
    """In one step, whichever optimizer: the model's own tensors do not depend on the factor, the others do."""
    one, two = (play(f"fraug(factor={f})", tiny_data(8), n=1, batch_size=8, **settings) for f in (1.0, 4.0))
    changed = {k for k in one.model if not torch.equal(one.model[k], two.model[k])}
    assert changed
    assert all(k.startswith("fraug.generator.") for k in changed)


@pytest.mark.parametrize("text", ["scaffold(control='difference')", "feddc"])
def test_control_variates_are_gradients_at_every_rate(text):
    """After one step, a control variate is the step's gradient, whichever rate the tensor has."""
    name = text.split("(")[0]
    runs = {f: play(f"fraug(factor={f}) + {text}", tiny_data(8), n=1, batch_size=8) for f in (1.0, 4.0)}
    one, four = ({k: t for k, t in r.states["a"].parts[name].items() if not k.startswith("h/")} for r in runs.values())
    close(one, four, atol=1e-9)


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
