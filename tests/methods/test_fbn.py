"""FBN: global statistics as constants in training, pooled without bias."""

import pytest
import torch

from fednorms.core.part import Route
from fednorms.data import Split
from tests.reference.fbn import fbn
from tests.support.after import trained
from tests.support.tiny import client_model, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_equals_a_plain_torch_loop_over_three_rounds():
    data = tiny_data()
    task = tiny_task("fbn(rho=0.3)", data)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    wanted = fbn(tiny_net(), pairs(data), plans, 0.1, 0.3)
    close({k: v for k, v in run.model.items() if task.net.routes[k] is Route.SHARED}, wanted.state_dict())
    close(run.server.parts["fbn"], {"norm.mean": wanted.norm.mean, "norm.var": wanted.norm.var})


def test_pooled_statistics_are_those_of_all_inputs_together():
    data = tiny_data()
    run = play("fbn(rho=1)", data, n=1, lr=0.0)  # the model does not move: every input is that of the first step
    seen = torch.cat([tiny_net().conv(s.x).detach() for s in data.values()]).transpose(0, 1).flatten(1)
    got = run.server.parts["fbn"]
    torch.testing.assert_close(got["norm.mean"], seen.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(got["norm.var"], seen.var(1, unbiased=False) * 28 / 27, atol=1e-12, rtol=0)


def test_identical_clients_have_the_local_variance_times_n_over_n_minus_1():
    one = tiny_data(6)["a"]
    data = {name: Split(one.x.clone(), one.y.clone()) for name in "abc"}
    run = play("fbn(rho=1)", data, n=1, lr=0.0)
    local = tiny_net().conv(one.x).detach().var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(run.server.parts["fbn"]["norm.var"], local * 18 / 17, atol=1e-12, rtol=0)


def test_the_normalizer_does_not_depend_on_the_batch_and_batches_of_one_train():
    data = tiny_data()
    net = tiny_task("fbn", data).net
    x = data["a"].x
    trained, _ = net.forward(net.initial.clone(), x, train=True, batch_statistics=True)
    alone, _ = net.forward(net.initial.clone(), x[:1], train=True, batch_statistics=True)
    tested, _ = net.forward(net.initial, x, train=False, batch_statistics=False)
    torch.testing.assert_close(trained[:1], alone, atol=1e-13, rtol=0)
    assert torch.equal(trained, tested)
    assert play("fbn", n=1, batch_size=1).model.finite()


def test_measurements_are_reset_at_each_start_and_clients_keep_nothing():
    data = tiny_data()
    task = tiny_task("fbn", data)
    run = rounds(task, data, 2)
    model = client_model(task, data, run, "b")
    for leaf in ("seen", "seen_mean", "seen_var"):
        assert not model[f"norm.{leaf}"].any()
    assert same({k: model[k] for k in ("norm.mean", "norm.var")}, run.server.parts["fbn"])
    assert not run.states["a"].local
    assert not run.states["a"].parts["fbn"]


def test_rate_zero_keeps_the_statistics():
    got = play("fbn(rho=0)", n=3).server.parts["fbn"]
    assert got["norm.mean"].tolist() == [0.0] * 4
    assert got["norm.var"].tolist() == [1.0] * 4


@pytest.mark.parametrize("mode", ["global", "global/batch", "global/re-estimated", "unseen"])
def test_every_evaluation_runs(mode):
    session, state = trained("fbn", evaluate=[mode])
    scores = session.engine.evaluate(state, session.modes[0], session.engine.clients)
    assert scores.statistics == (mode.partition("/")[2] or "global")


def test_tests_with_the_batch_do_use_the_batch():
    session, _ = trained("fbn", n=0)
    net = session.task.net
    x = torch.randn(5, 3, 8, 8)
    one, _ = net.forward(net.initial.clone(), x, train=False, batch_statistics=True)
    bn = trained("fedavg", n=0)[0].task.net
    other, _ = bn.forward(bn.initial.clone(), x, train=False, batch_statistics=True)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert not torch.allclose(one, net.forward(net.initial, x, train=False, batch_statistics=False)[0], atol=1e-3)
