"""FedFA: augmented feature statistics."""

import pytest
import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.layers.feature_augment import FeatureAugment, channel_factors, feature_augment, instance_pair, stages
from fednorms.methods.registry import method
from fednorms.models import build
from tests.reference.fedfa import augmented, factors
from tests.support.tiny import play, rounds, same, tiny_data, tiny_net, tiny_task

OURS = {"pool.1.mean", "pool.1.std"}
BETWEEN = {"pool.1.between_mean", "pool.1.between_std"}


def images(n=5, c=3):
    return torch.randn(n, c, 4, 4, dtype=torch.float64)


def test_the_factors_at_a_known_point():
    assert channel_factors(torch.tensor([1.0, 3.0]), eps=0.0).tolist() == pytest.approx([0.8, 1.2])
    v = torch.rand(6).double()
    assert channel_factors(v).tolist() == pytest.approx(factors(v))


def test_the_formula_against_loops():
    x, noises, between = images(), torch.randn(2, 5, 3).double(), torch.rand(2, 3).double()
    got = feature_augment(x, instance_pair(x), (between[0], between[1]), (noises[0], noises[1]), torch.tensor(True))
    torch.testing.assert_close(got, augmented(x, between[0], between[1], noises[0], noises[1]), atol=1e-10, rtol=0)


def test_without_noise_features_stay_and_evaluation_is_the_identity():
    x = images()
    none = torch.zeros(5, 3).double()
    ones = torch.ones(3).double()
    torch.testing.assert_close(
        feature_augment(x, instance_pair(x), (ones, ones), (none, none), torch.tensor(True)), x, atol=1e-5, rtol=0
    )
    assert torch.equal(FeatureAugment(3, p=1.0).eval()(x), x)


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (4, 3, 1, 1), (1, 3, 1, 1)])
def test_one_image_or_one_position_is_no_special_case(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    layer = FeatureAugment(3, p=1.0).double()
    y = layer(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all()
    assert g.isfinite().all()
    if shape[0] == 1 and shape[-1] > 1:
        torch.testing.assert_close(y, x, atol=0.05, rtol=0.05)  # the variance over one image is eps


def test_a_layer_fires_with_its_probability_and_records_only_then():
    layer, x = FeatureAugment(3, p=0.3, momentum=0.9, stream=5).double(), images()
    fired = 0
    for k in range(300):
        before = layer.mean.clone(), layer.std.clone()
        with noise.keyed(torch.tensor([k, 1])):
            y = layer(x)
        if torch.equal(y, x):
            assert torch.equal(layer.mean, before[0])
            assert torch.equal(layer.std, before[1])
        else:
            fired += 1
            mu, sigma = instance_pair(x)
            torch.testing.assert_close(layer.mean, 0.9 * before[0] + 0.1 * mu.mean(0), atol=1e-12, rtol=0)
            torch.testing.assert_close(layer.std, 0.9 * before[1] + 0.1 * sigma.mean(0), atol=1e-12, rtol=0)
    assert 60 < fired < 120


def test_the_jitter_is_normal_with_the_variance_of_the_formula():
    layer, x = FeatureAugment(2, p=1.0, stream=1).double(), images(6, 2)
    means = []
    for k in range(3000):
        with noise.keyed(torch.tensor([k, 3])):
            means.append(instance_pair(layer(x))[0])
    mu = instance_pair(x)[0]
    spread = torch.stack(means).var(0)
    wanted = 2 * (mu.var(0) + 1e-6)  # both channels vary alike between clients: factor 1
    torch.testing.assert_close(spread, wanted.expand_as(spread), atol=0, rtol=0.15)
    torch.testing.assert_close(torch.stack(means).mean(0), mu, atol=0.1, rtol=0)


def test_the_server_takes_the_variance_of_the_clients_statistics():
    data = tiny_data()
    for kind in ("channel", "scalar"):
        run = play(f"fedfa(after=pool, p=1.0, momentum=0.5, variance={kind})", data, n=2)
        for leaf in ("mean", "std"):
            rows = torch.stack([u.model[f"pool.1.{leaf}"] for u in run.uploads.values()])
            wanted = rows.var(0) if kind == "channel" else rows.var().expand(4)
            got = run.server.parts["fedfa"][f"pool.1.between_{leaf}"]
            torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_one_client_does_not_change_the_variances():
    data = tiny_data()
    task = tiny_task("fedfa(after=pool)", data)
    one = rounds(task, data, 1, cohorts=["a"])
    assert not one.server.parts["fedfa"]
    two = rounds(task, data, 1, run=one)
    three = rounds(task, data, 1, run=two, cohorts=["b"])
    assert two.server.parts["fedfa"].keys() == BETWEEN
    assert same(two.server.parts["fedfa"], three.server.parts["fedfa"])


def test_routes_uploads_and_averages():
    data = tiny_data(8, 8)
    task = tiny_task("fedfa(after=pool, p=1.0)", data)
    run = rounds(task, data, 1)
    assert {n for n, r in task.net.routes.items() if r is Route.OWNED} == BETWEEN
    assert not BETWEEN & run.uploads["a"].model.keys()
    for name in OURS:
        torch.testing.assert_close(
            run.model[name], (run.uploads["a"].model[name] + run.uploads["b"].model[name]) / 2, atol=1e-12, rtol=0
        )


def test_probability_zero_is_fedavg_bit_for_bit():
    run, plain = play("fedfa(after=pool, p=0)", n=3), play("fedavg", n=3)
    assert all(torch.equal(run.model[n], plain.model[n]) for n in plain.model)


def test_gregs_second_pass_does_not_change_the_layers_statistics():
    data = tiny_data()
    start = {}
    for text in (
        "greg(alpha=0, rho=1) + fedfa(after=pool, p=1.0)",
        "greg(alpha=3.0, rho=1) + fedfa(after=pool, p=1.0)",
    ):
        task = tiny_task(text, data, steps=1)
        first = rounds(tiny_task("fedfa(after=pool, p=1.0) + greg(rho=1)", data, steps=1), data, 1)
        start[text] = rounds(task, data, 1, run=first, cohorts=["a"]).uploads["a"].model
    one, other = start.values()
    assert not torch.equal(one["conv.weight"], other["conv.weight"])
    assert all(torch.equal(one[n], other[n]) for n in OURS)


PLACES = {
    "lenet": ([64, 64], 32),
    "digits-cnn": ([64, 64, 128], 28),
    "cnn-small": ([16, 32, 32], 16),
    "alexnet": ([64, 192, 384, 256, 256], 64),
    "torchvision:resnet18": ([64, 64, 128, 256, 512], 64),
    "resnet20": ([16, 16, 32, 64], 16),
    "resnet18-cifar": ([64, 64, 128, 256, 512], 16),
    "mobilenet-v1": ([64, 128, 256, 512, 1024], 32),
    "cnn4": ([64, 64, 64, 64], 32),
    "torchvision:alexnet": ([64, 192, 384, 256, 256], 64),
    "timm:resnet10t": ([64, 64, 128, 256, 512], 64),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_and_channels(name):
    wanted, size = PLACES[name]
    model = build(name, classes=4, channels=3, size=size, seed=0)
    net = Net(model, method("fedfa(p=1.0)"), name=name)
    layers = [m for m in net.module.modules() if isinstance(m, FeatureAugment)]
    assert [m.channels for m in layers] == wanted
    assert set(model.state_dict()) < set(net.initial)  # all names are kept
    logits, _ = net.forward(net.initial.clone(), torch.rand(2, 3, size, size), train=True, batch_statistics=True)
    assert logits.shape == (2, 4)
    assert len({m.stream for m in layers}) == len(layers)


def test_refusals():
    with pytest.raises(BadInput, match="Name the modules"):
        tiny_task("fedfa", tiny_data())
    with pytest.raises(BadInput, match='no module "nowhere"'):
        tiny_task("fedfa(after=nowhere)", tiny_data())
    with pytest.raises(BadInput, match="its own tensors"):
        tiny_task("fedfa(after=conv)", tiny_data())
    with pytest.raises(BadInput, match="got features of shape"):
        FeatureAugment(3)(torch.zeros(2, 4, 5, 5))


def test_a_plain_row_of_layers():
    row = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU()
    )
    assert stages(nn.Sequential(*row, nn.Flatten(), nn.Linear(5, 2))) == ["3", "5"]
    assert stages(tiny_net()) == []
