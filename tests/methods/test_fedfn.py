"""FedFN and FedFR."""

import math

import pytest
import torch
from torch import nn

from fednorms.methods.fedfn import FedFR
from tests.reference.fedavg import average, train
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


class Hand(nn.Module):
    """TinyNet with the features divided by their norm by hand."""

    def __init__(self, net, bias=True):
        super().__init__()
        self.conv, self.norm, self.pool, self.head = net.conv, net.norm, net.pool, net.head
        if not bias:
            self.head.bias = None

    def forward(self, x):
        f = self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1)
        return self.head(f / f.pow(2).sum(1, keepdim=True).sqrt())


@pytest.mark.parametrize("bias", [True, False])
def test_equals_a_plain_torch_loop(bias):
    data = tiny_data()
    task = tiny_task(f"fedfn(bias={bias})", data)
    states = []
    for (x, y), name in zip(pairs(data), "abc", strict=True):
        local = train(Hand(tiny_net(), bias), x, y, plan_of(task, data[name], name, 0), 0.1)
        states.append(local.state_dict())
    run = rounds(task, data, 1)
    close(run.model, average(states, [float(len(s)) for s in data.values()]))
    assert ("head.bias" in run.model) is bias


def test_a_feature_of_length_five_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).double()
    model[1].weight.data = torch.eye(2, dtype=torch.float64)
    net = tiny_task("fedfn", tiny_data(), model=model).net
    f = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    z, _ = net.forward(net.initial, f, train=True, batch_statistics=True)
    torch.testing.assert_close(z.detach(), torch.tensor([[0.6, 0.8]], dtype=torch.float64))
    loss = nn.functional.cross_entropy(z, torch.tensor([0]))
    assert float(loss.detach()) == pytest.approx(0.7981, abs=5e-5)
    (g,) = torch.autograd.grad(loss, f)
    assert abs(float((g * f.detach()).sum())) < 1e-15  # the loss does not see the feature's length
    z7, _ = net.forward(net.initial, 7 * f, train=False, batch_statistics=False)
    torch.testing.assert_close(z7, z)


def test_the_heads_gradient():
    data = tiny_data(5)
    run = play("fedfn", data, n=1, batch_size=5, lr=1.0)
    model = Hand(tiny_net())
    x, y = data["a"].x, data["a"].y
    with torch.no_grad():
        f = model.pool(torch.relu(model.norm(model.conv(x)))).flatten(1)
        f = f / f.norm(dim=1, keepdim=True)
        p = model.head(f).softmax(1) - nn.functional.one_hot(y, 3)
        wanted = model.head.weight - p.T @ f / 5
    torch.testing.assert_close(run.model["head.weight"], wanted, atol=1e-12, rtol=0)


def test_fedfr_mu_zero_is_fedavg_bit_for_bit():
    assert same(play("fedfr(mu=0)").model, play("fedavg").model)


def test_fedfr_equals_a_plain_torch_loop():
    data, mu = tiny_data(), 0.5
    task = tiny_task(f"fedfr(mu={mu})", data)
    states = []
    for (x, y), name in zip(pairs(data), "abc", strict=True):
        local = tiny_net().train()
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        for rows in plan_of(task, data[name], name, 0):
            optimizer.zero_grad()
            f = local.pool(torch.relu(local.norm(local.conv(x[rows])))).flatten(1)
            loss = nn.functional.cross_entropy(local.head(f), y[rows]) + mu * f.norm(dim=1).mean()
            loss.backward()
            optimizer.step()
        states.append(local.state_dict())
    close(rounds(task, data, 1).model, average(states, [float(len(s)) for s in data.values()]), atol=1e-10)


def test_fedfrs_gradient_has_length_mu_over_the_batch_and_is_finite_at_zero():
    class Seen:
        features = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)

    (g,) = torch.autograd.grad(FedFR(mu=0.2).loss(Seen), Seen.features)
    assert float(g[0].norm()) == pytest.approx(0.2 / 2)
    assert g[1].tolist() == [0.0, 0.0]
    assert math.isclose(float(FedFR(mu=0.2).loss(Seen).detach()), 0.2 * 2.5, rel_tol=1e-6)


def test_on_top_of_other_methods():
    for text in ("scaffold + fedfn", "fedexp + fedfn", "fedbn + fedfn + fedfr", "greg + fedfn"):
        assert play(text).model.finite()
