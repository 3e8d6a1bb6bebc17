"""HBN: pooled statistics and the learned mixture."""

import numpy as np
import pytest
import torch
from torch import nn

from fednorms.core.part import Route
from fednorms.core.passes import LocalView, passes
from fednorms.core.reductions import reduce_uploads
from fednorms.core.round import broadcast, own_state
from fednorms.core.states import Client, context_of
from fednorms.core.views import Round
from tests.reference.hbn import hbn, pooled
from tests.support.tiny import client_model, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def measured(task, data, run, when="evaluate"):
    """What the server gets from a statistics pass over all clients."""
    p, job = passes(task, when)[0]
    sent = broadcast(task, run.server)
    trees = []
    for name, split in data.items():
        client = Client(name, split, run.states.get(name))
        context = context_of(task, sent.round, client)
        mine = own_state(task, sent, client.state)
        model = client_model(task, data, run, name)
        trees.append(job.client(LocalView(task, p, client, model, context, sent, mine))[1])
    up = reduce_uploads(trees, [1.0] * len(trees), job.reduce)
    here = Round(run.model, up, run.server.parts["hbn"], len(data), len(data), context_of(task, 0, None))
    return job.server(up, here)


def test_equals_a_plain_torch_loop_over_three_rounds():
    data = tiny_data()
    task = tiny_task("hbn(rate=0.3)", data)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    server, phis = hbn(tiny_net(), pairs(data), plans, 0.1, 0.3, batch_size=4)
    got = {**run.model, **run.server.parts["hbn"]}
    close(got, server.state_dict())
    for name, phi in zip("abc", phis, strict=True):
        close(run.states[name].local, {"norm.phi": phi})


def test_pooled_statistics_are_those_of_all_data_together():
    # A network that normalizes its raw input, one value per image and channel: images are values.
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.norm(x).flatten(1))

    data = tiny_data()
    data = {k: type(s)(s.x[:, :, :1, :1], s.y) for k, s in data.items()}
    task = tiny_task("hbn", data, model=First())
    run = rounds(task, data, 0)
    got = measured(task, data, run)
    everything = torch.cat([s.x for s in data.values()]).flatten(1)
    torch.testing.assert_close(got["norm.mean"], everything.mean(0), atol=1e-12, rtol=0)
    torch.testing.assert_close(got["norm.var"], everything.var(0), atol=1e-12, rtol=0)


def test_the_formula_of_the_pool():
    rng = np.random.default_rng(0)
    values = [rng.normal(k, 1 + k, (n, 2)) for k, n in enumerate((5, 9, 3))]
    m, v = pooled([a.mean(0) for a in values], [a.var(0) for a in values], [len(a) for a in values])
    together = np.concatenate(values)
    np.testing.assert_allclose(m, together.mean(0), atol=1e-12)
    np.testing.assert_allclose(v, together.var(0, ddof=1), atol=1e-12)


def test_a_test_measures_again_and_does_not_depend_on_the_rate():
    data = tiny_data()
    for rate in (0.0, 0.7):
        task = tiny_task(f"hbn(rate={rate})", data)
        run = rounds(task, data, 0)
        got = measured(task, data, run)
        h = torch.cat([tiny_net().conv(s.x) for s in data.values()]).detach()
        torch.testing.assert_close(
            got["norm.mean"],
            sum(len(s) * tiny_net().conv(s.x).detach().mean((0, 2, 3)) for s in data.values()) / 28,
            atol=1e-12,
            rtol=0,
        )
        biased = h.var((0, 2, 3), unbiased=False)
        torch.testing.assert_close(got["norm.var"], biased * 28 / 27, atol=1e-12, rtol=0)


def test_rate_zero_keeps_the_global_statistics():
    run = play("hbn(rate=0)", n=3)
    assert run.server.parts["hbn"]["norm.mean"].tolist() == [0.0] * 4
    assert run.server.parts["hbn"]["norm.var"].tolist() == [1.0] * 4


def test_measuring_does_not_change_model_and_data():
    data = tiny_data()
    task = tiny_task("hbn", data)
    run = rounds(task, data, 1)
    before = {k: v.clone() for k, v in run.model.items()}
    measured(task, data, run)
    assert same(before, run.model)


def test_routes():
    net = tiny_task("hbn", tiny_data()).net
    assert net.routes["norm.mean"] is net.routes["norm.var"] is Route.OWNED
    assert net.routes["norm.phi"] is Route.SENT
    run = play("hbn", n=2)
    sizes = {"a": 11, "b": 7, "c": 10}
    mean = sum(n * run.states[k].local["norm.phi"] for k, n in sizes.items()) / 28
    torch.testing.assert_close(run.model["norm.phi"], mean, atol=1e-14, rtol=0)


@pytest.mark.parametrize(("phi", "limit"), [(40.0, "batch"), (-40.0, "global")])
def test_the_limits_of_the_mixture(phi, limit):
    data = tiny_data()
    task = tiny_task("hbn(rate=0)", data)
    tensors = task.net.initial.clone()
    tensors["norm.phi"].fill_(phi)
    x = data["b"].x
    model = tiny_net()
    model.norm.train(limit == "batch")
    got, _ = task.net.forward(tensors, x, train=True, batch_statistics=True)
    torch.testing.assert_close(got, model(x), atol=1e-12, rtol=0)


def test_the_authors_pass_looks_at_one_batch_and_mixed_statistics():
    for images, one_batch in ((64, True), (80, False)):
        data = tiny_data(images)
        task = tiny_task("hbn(variant=author)", data)
        got = measured(task, data, rounds(task, data, 0))["norm.mean"]
        h = tiny_net().conv(data["a"].x).detach()
        # phi = 0: half of the global mean 0 and half of the batch mean, of the first 64 images as they are stored.
        torch.testing.assert_close(got, h[:64].mean((0, 2, 3)) / 2, atol=1e-12, rtol=0)
        assert torch.allclose(got, h.mean((0, 2, 3)) / 2, atol=1e-12, rtol=0) is one_batch


def test_the_measured_model_is_the_broadcast_one_with_its_global_statistics():
    # In round 1 the pass runs under the statistics that round 0 left, not the initial ones.
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.second(torch.relu(self.first(x))).mean((2, 3)))

    data = tiny_data(6)
    task = tiny_task("hbn(rate=0.5)", data, model=Two(), lr=0.0, batch_size=6)
    one = rounds(task, data, 1)
    two = rounds(task, data, 1, run=one)
    sent = one.server.parts["hbn"]
    x = data["a"].x
    m, v = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    mu = (sent["first.mean"] + m) / 2
    var = (sent["first.var"] + v) / 2
    inner = torch.relu((x - mu[:, None, None]) / (var + 1e-5).sqrt()[:, None, None])
    wanted = 0.5 * inner.mean((0, 2, 3)) + 0.5 * sent["second.mean"]
    torch.testing.assert_close(two.server.parts["hbn"]["second.mean"], wanted, atol=1e-12, rtol=0)
