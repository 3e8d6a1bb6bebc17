"""A custom normalization layer with its own buffer names does all that BatchNorm does, bit for bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import override

import fednorms as fn
from fednorms.core import norms
from fednorms.core.net import Net
from fednorms.core.norms import is_batchnorm, stored_statistics
from fednorms.core.passes import shuffled_rows
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import Client
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import Mode, model_for
from fednorms.methods.registry import method
from tests.support.after import federation
from tests.support.engines import engine_of
from tests.support.tiny import TinyNet, play, same, tiny_data

NAMES = {"norm.running_mean": "norm.centre", "norm.running_var": "norm.spread"}


@fn.norm_layer(fn.Statistics(mean="centre", var="spread", batchnorm=True))
class CentreNorm(nn.Module):
    """Batch normalization that calls its statistics "centre" and "spread", and counts no batches."""

    def __init__(self, num_features):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, 1e-5, 0.1
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("centre", torch.zeros(num_features))
        self.register_buffer("spread", torch.ones(num_features))

    @override
    def forward(self, x):
        momentum = self.momentum if self.training else 0.0
        return F.batch_norm(x, self.centre, self.spread, self.weight, self.bias, self.training, momentum, self.eps)


def with_history(net, mean, var):
    """The same net after some training elsewhere: stored statistics that surgery must not lose."""
    with torch.no_grad():
        mean.copy_(torch.linspace(-0.2, 0.4, 4))
        var.copy_(torch.linspace(0.5, 2.0, 4))
    return net


def known_net():
    net = TinyNet()
    return with_history(net, net.norm.running_mean, net.norm.running_var)


def custom_net():
    net = TinyNet()
    net.norm = CentreNorm(4)
    return with_history(net, net.norm.centre, net.norm.spread)


def renamed(tree):
    return {NAMES.get(k, k): v for k, v in tree.items() if not k.endswith("num_batches_tracked")}


def trained(text, model, rounds=3):
    """A task, its engine and the server's state after some rounds in float64."""
    task, engine = engine_of(Loop, text, federation(), model=model)
    state = engine.setup(initial_state(task))
    for _ in range(rounds):
        state = server_update(task, state, engine.train(broadcast(task, state), ["a", "b", "c"]).uploads)
    return task, engine, state


CASES = {
    "fedavg": ("global", "global/batch", "global/batch:3", "global/re-estimated", "unseen", "unseen/re-estimated"),
    "greg": ("global", "global/batch"),  # its second forward pass normalizes with the received statistics
    "greg(detach_global=true, rho=1)": ("global",),
    "mixbn(kind=learned)": ("global", "global/re-estimated"),
    "fixbn(switch=0.25)": ("global", "global/re-estimated"),
    "silobn": ("personal", "global/own", "unseen", "personal/re-estimated"),
    "fedbn": ("personal", "personal/batch", "unseen"),
    "fedbn(upload=true)": ("personal", "personal/global"),
    "hbn": ("global", "global/re-estimated"),
    "fbn": ("global",),
    "rbn": ("global", "global/re-estimated"),
    "adabn": ("global", "unseen"),
    "agn": ("global",),
}


@pytest.mark.parametrize("text", CASES)
def test_a_custom_layer_gives_the_bits_of_batchnorm(text):
    (task, engine, state), (_, custom, other) = trained(text, known_net), trained(text, custom_net)
    assert same(renamed(state.model), renamed(other.model))
    for name, tree in state.parts.items():
        assert same(renamed(tree), renamed(other.parts[name]))
    for mode in map(Mode.read, CASES[text]):
        mode = mode.resolved(task)
        cohort = ["a", "b", "c"]
        one, two = (e.evaluate(s, mode, cohort).sites for e, s in ((engine, state), (custom, other)))
        assert one.keys() == two.keys() != set()
        assert all(one[site].loss == two[site].loss for site in one)


def test_global_and_batch_statistics_differ_and_batch_statistics_do_not_change_the_model():
    task, engine, state = trained("fedavg", custom_net)
    before = state.model.clone()
    losses = [engine.evaluate(state, Mode.read(m).resolved(task), ["a"]).sites["a"].loss for m in CASES["fedavg"][:4]]
    assert len(set(losses)) == 4
    assert same(before, state.model)


def test_re_estimated_statistics_are_the_mean_over_batches():
    task, _, state = trained("adabn", custom_net)
    site = federation().clients[0]
    found, _ = model_for(
        task, broadcast(task, state), Client("a", site.train), Mode.read("global/re-estimated").resolved(task)
    )
    plain = custom_net().double()
    plain.load_state_dict(state.model)
    means, variances, total = 0.0, 0.0, len(site.train)
    for rows in shuffled_rows("a", total).split(task.training.batch_size):
        x = plain.conv((site.train.x[rows].double() / 255 - 0.5) / 0.5).detach()
        values = x.transpose(0, 1).flatten(1)
        means = means + len(rows) / total * values.mean(1)
        variances = variances + len(rows) / total * values.var(1)
    torch.testing.assert_close(found["norm.centre"], means, atol=1e-12, rtol=0)
    torch.testing.assert_close(found["norm.spread"], variances, atol=1e-12, rtol=0)


def test_routes_find_the_layer_by_its_type():
    net = Net(custom_net(), method("silobn"))
    assert sorted(net.own) == ["norm.centre", "norm.spread"]
    net = Net(custom_net(), method("fedbn"))
    assert sorted(net.own) == ["norm.bias", "norm.centre", "norm.spread", "norm.weight"]


def test_surgery_starts_from_the_stored_statistics():
    net, expected = Net(custom_net(), method("hbn")), custom_net()
    assert [str(change) for change in net.changes["hbn"]] == ["norm: CentreNorm(4) -> HybridNorm(4)"]
    assert torch.equal(net.initial["norm.mean"], expected.norm.centre)
    assert torch.equal(net.initial["norm.var"], expected.norm.spread)


def test_noise_never_leaves_a_negative_variance():
    run = play("dpcentral(noise=50)", tiny_data(8, 8), model=custom_net().double(), n=1)
    assert (run.model["norm.spread"] >= 0).all()
    assert (run.model["norm.spread"] == 0).any()  # some would be negative


def test_fedtan_needs_the_batchnorm_of_torch():
    with pytest.raises(fn.BadInput, match=r'fedtan .*"norm".* CentreNorm'):
        Net(custom_net(), method("fedtan"))


def test_a_subclass_is_registered_with_its_base_and_can_leave_it():
    class Other(CentreNorm):
        pass

    assert is_batchnorm(Other(2))
    try:
        fn.norm_layer()(Other)  # now one that normalizes the same way in training and tests
        assert not is_batchnorm(Other(2))
        assert stored_statistics(Other(2)) is None
        assert is_batchnorm(CentreNorm(2))
    finally:
        del norms._NORMS[Other]


def test_only_modules_are_registered():
    with pytest.raises(fn.BadInput, match=r"subclass of nn\.Module"):
        fn.norm_layer()(dict)
