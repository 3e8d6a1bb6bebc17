"""FedSR: random features with a reference Gaussian per class."""

import pytest
import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.net import Net
from fednorms.layers import GaussianFeatures, GaussianLinear
from fednorms.layers.gaussian_linear import moments
from fednorms.methods.fedsr import divergence
from fednorms.methods.registry import method
from tests.methods.test_moon import features
from tests.reference.fedsr import fedsr, predict, terms
from tests.support.tiny import (
    TinyNet,
    client_model,
    close,
    pairs,
    plan_of,
    play,
    rounds,
    same,
    tiny_data,
    tiny_net,
    tiny_task,
)

REFERENCE = [f"head.0.{leaf}" for leaf in ("reference_mean", "reference_deviation", "scale")]


class Body(TinyNet):
    """The tiny network without its classifier."""

    def __init__(self, other):
        super().__init__()
        self.load_state_dict(other.state_dict())
        del self.head

    def forward(self, x):
        return features(self, x)


def known(shape):
    """Numbers instead of random ones, which the reference can compute, too."""
    return torch.arange(shape.numel(), dtype=torch.float64).sin().reshape(shape)


def started(text):
    data = tiny_data()
    task = tiny_task(text, data)
    state = task.net.initial
    linear, head = nn.Linear(16, state["head.0.weight"].shape[0]), nn.Linear(state["head.1.weight"].shape[1], 3)
    linear.double().load_state_dict({n: state[f"head.0.{n}"] for n in ("weight", "bias")})
    head.double().load_state_dict({n: state[f"head.1.{n}"] for n in ("weight", "bias")})
    return data, task, (Body(tiny_net()).double(), linear, head)


@pytest.mark.parametrize("dim", [0, 5])
def test_equals_a_plain_torch_loop_over_three_rounds(monkeypatch, dim):
    monkeypatch.setattr(GaussianLinear, "normal", lambda self, like: known(like.shape))
    data, task, start = started(f"fedsr(l2r=0.3, cmi=0.05, dim={dim})")
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    server, own = fedsr(*start, pairs(data), plans, 0.1, 0.3, 0.05, known)
    wanted = {
        "head.0" + n[1:] if n[0] == "1" else "head.1" + n[1:] if n[0] == "2" else n[2:]: t
        for n, t in server.state_dict().items()
    }
    close({n: run.model[n] for n in wanted}, wanted, atol=1e-8)
    for name, values in zip(data, own, strict=True):
        found = client_model(task, data, run, name)
        close({n: found[n] for n in REFERENCE}, dict(zip(REFERENCE, values, strict=True)), atol=1e-8)
    layer = task.net.module.get_submodule("head.1")
    logits, _ = task.net.forward(run.model, data["a"].x, train=False, batch_statistics=False)
    torch.testing.assert_close(logits.exp(), predict(server.eval(), data["a"].x, layer.draws), atol=1e-8, rtol=0)


def test_the_length_is_that_of_the_sample_that_was_classified(monkeypatch):
    seen = []
    real = GaussianLinear.normal
    monkeypatch.setattr(GaussianLinear, "normal", lambda self, like: seen.append(real(self, like)) or seen[-1])
    play("fedsr", tiny_data(4), n=1, steps=2)
    (a, again), (b, repeated) = seen[-4:-2], seen[-2:]
    assert torch.equal(a, again)
    assert torch.equal(b, repeated)
    assert not torch.equal(a, b)


def test_the_divergence_is_torchs():
    """The authors' regL2R and regCMI on such numbers differ by at most 3e-7 (they compute in float32)."""
    mean, raw, z, to_mean, to_raw = torch.randn(5, 6, 4, dtype=torch.float64)
    y, scale = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor(0.7).double()
    deviation = nn.functional.softplus(raw)
    length, apart = terms(z, mean, deviation, y, to_mean, to_raw, scale)
    ours = divergence(scale * mean, scale * deviation, to_mean, nn.functional.softplus(to_raw))
    torch.testing.assert_close(ours, apart, atol=1e-12, rtol=0)
    torch.testing.assert_close(z.norm(dim=1).mean(), length, atol=1e-12, rtol=0)


def test_draws_are_standard_normals_and_have_the_same_values_in_both_precisions():
    layer = GaussianLinear(50, 3, samples=400)
    with noise.keyed(torch.tensor([3, 4])):
        wide = layer.normal(torch.empty(400, 50, dtype=torch.float64))
    with noise.keyed(torch.tensor([3, 4])):
        narrow = layer.normal(torch.empty(400, 50))
    assert torch.equal(wide, narrow.double())
    for e in (wide, layer.draws):
        assert abs(e.mean()) < 0.03
        assert abs(e.std() - 1) < 0.03


def test_without_deviation_a_test_has_the_logits_of_the_mean():
    some, none = GaussianLinear(4, 3, samples=7).eval(), GaussianLinear(4, 3, samples=0).eval()
    none.load_state_dict(some.state_dict())
    f = torch.cat([torch.randn(5, 4), torch.full((5, 4), -200.0)], 1)
    torch.testing.assert_close(some(f), none(f).log_softmax(1))
    assert torch.equal(none(f), nn.functional.linear(moments(f)[0], none.weight, none.bias))


def test_clients_keep_their_reference_and_predictions_do_not_depend_on_it():
    data = tiny_data()
    task = tiny_task("fedsr(cmi=0.1)", data)
    run = rounds(task, data, 2)
    assert set(run.states["a"].local) == set(REFERENCE)
    assert not same(run.states["a"].local, run.states["b"].local)
    a, b = (client_model(task, data, run, name) for name in "ab")
    one, two = (task.net.forward(m, data["c"].x, train=False, batch_statistics=False)[0] for m in (a, b))
    assert torch.equal(one, two)


def test_the_classifier_keeps_its_weights_and_the_new_layer_depends_on_the_model_only():
    nets = [Net(tiny_net(seed), method("fedsr"), dtype=torch.float64) for seed in (0, 0, 1)]
    assert torch.equal(nets[0].initial["head.1.weight"], tiny_net().head.weight)
    assert torch.equal(nets[0].initial["head.0.weight"], nets[1].initial["head.0.weight"])
    assert not torch.equal(nets[0].initial["head.0.weight"], nets[2].initial["head.0.weight"])
    assert isinstance(nets[0].module.get_submodule("head.0"), GaussianFeatures)
    assert nets[0].head_names == {"head.1.weight", "head.1.bias"}
