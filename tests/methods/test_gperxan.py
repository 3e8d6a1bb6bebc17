"""gPerXAN: local batch and shared instance normalization, and a second look by the received classifier."""

import copy

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.layers import AssembledNorm
from fednorms.methods.registry import method
from tests.reference.fedavg import average
from tests.support.tiny import close, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task


class Both(nn.Module):
    """The paper's layer from torch's own."""

    def __init__(self, channels):
        super().__init__()
        self.bn, self.ino = nn.BatchNorm2d(channels), nn.InstanceNorm2d(channels, affine=True)
        self.scores = nn.Parameter(torch.ones(2))

    def forward(self, x):
        e = self.scores.exp()
        return (e[0] * self.bn(x) + e[1] * self.ino(x)) / e.sum()


def test_the_layer_is_torchs_two_layers():
    torch.manual_seed(0)
    ours, theirs = AssembledNorm(3).double(), Both(3).double()
    for p in (ours, theirs):
        with torch.no_grad():
            p.scores.copy_(torch.tensor([0.3, -1.0]))
    with torch.no_grad():
        for mine, other in ((ours.weight, theirs.bn.weight), (ours.instance_weight, theirs.ino.weight)):
            other.copy_(torch.rand(3) + 0.5)
            mine.copy_(other)
    for mode in (True, True, False):
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
        torch.testing.assert_close(ours.train(mode)(x), theirs.train(mode)(x), atol=1e-12, rtol=0)


NAMES = {"bn.": "norm.", "ino.": "norm.instance_", "scores": "norm.scores"}


def ours_of(name):
    for theirs, mine in NAMES.items():
        if name.startswith(f"norm.{theirs}"):
            return mine + name.removeprefix(f"norm.{theirs}")
    return name


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_equals_a_plain_torch_loop(lam):
    data, lr = tiny_data(), 0.1
    task = tiny_task(f"gperxan(lam={lam})", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(2)]
    first = tiny_net()
    first.norm = Both(4).double()
    server, local = first, [copy.deepcopy(first) for _ in data]
    for plan in plans:
        for net, (x, y), batches in zip(local, pairs(data), plan, strict=True):
            sent = {n: t for n, t in server.state_dict().items() if ".bn." not in n}
            net.load_state_dict({**net.state_dict(), **copy.deepcopy(sent)})
            head = copy.deepcopy(net.head)
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            net.train()
            for rows in batches:
                f = net.pool(torch.relu(net.norm(net.conv(x[rows])))).flatten(1)
                ce = nn.functional.cross_entropy
                optimizer.zero_grad()
                (ce(net.head(f), y[rows]) + lam * ce(head(f), y[rows])).backward()
                optimizer.step()
        server = copy.deepcopy(first)
        server.load_state_dict(average([m.state_dict() for m in local], [float(len(s)) for s in data.values()]))
    run = rounds(task, data, 2)
    found = {ours_of(n): t for n, t in server.state_dict().items() if ".bn." not in n}
    close(run.model.pick(found), found)
    for k, net in zip(data, local, strict=True):
        own = {ours_of(n): t for n, t in net.state_dict().items() if ".bn." in n and t.is_floating_point()}
        close(run.states[k].local.pick(own), own)


def test_routes():
    routes = Net(tiny_net(), method("gperxan")).routes
    assert {n for n, r in routes.items() if r is Route.LOCAL} == {
        f"norm.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_pretrained_tensors_keep_their_names_and_values():
    net = tiny_net()
    with torch.no_grad():
        net.norm.weight.mul_(3)
        net.norm.running_mean.add_(2)
    made = Net(net, method("gperxan"), dtype=torch.float64).initial
    assert torch.equal(made["norm.running_mean"], net.norm.running_mean)
    assert torch.equal(made["norm.instance_weight"], made["norm.weight"])


@pytest.mark.parametrize("text", ["gperxan + fedper", "gperxan + fedbabu", "gperxan + fedfn", "gn(groups=2) + gperxan"])
def test_what_it_needs_is_said(text):
    with pytest.raises(BadInput, match="gperxan"):
        play(text)
