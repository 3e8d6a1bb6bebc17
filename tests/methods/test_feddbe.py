"""FedDBE: a local vector before the classifier, and a common mean of features."""

import copy

import pytest
import torch
from torch import nn

from tests.reference.fedavg import average
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def reference(model, clients, plans, lr, kappa, momentum):
    """The authors' loop, whose first round is FedAvg's and measures the common mean."""
    server, shifts = copy.deepcopy(model), [torch.zeros(16, dtype=torch.float64) for _ in clients]
    common = None
    for plan in plans:
        states, means = [], []
        for k, ((x, y), batches) in enumerate(zip(clients, plan, strict=True)):
            net, m = copy.deepcopy(server).train(), torch.zeros(16, dtype=torch.float64)
            for rows in batches:
                v = shifts[k].clone().requires_grad_()
                f = net.pool(torch.relu(net.norm(net.conv(x[rows])))).flatten(1)
                running = (1 - momentum) * m + momentum * f.mean(0)
                if common is None:
                    loss = nn.functional.cross_entropy(net.head(f), y[rows])
                    grads = torch.autograd.grad(loss, list(net.parameters()))
                else:
                    loss = nn.functional.cross_entropy(net.head(f + v), y[rows])
                    loss = loss + kappa * (0.5 * (running - common) ** 2).mean()
                    *grads, slope = torch.autograd.grad(loss, [*net.parameters(), v])
                    shifts[k] = shifts[k] - lr * slope
                with torch.no_grad():
                    for p, g in zip(net.parameters(), grads, strict=True):
                        p -= lr * g
                m = running.detach()
            states.append(net.state_dict())
            means.append(m)
        sizes = [float(len(x)) for x, _ in clients]
        server.load_state_dict(average(states, sizes))
        if common is None:
            common = sum(n * m for n, m in zip(sizes, means, strict=True)) / sum(sizes)
    return server, shifts, common


@pytest.mark.parametrize(("kappa", "momentum"), [(0.0, 0.1), (5.0, 0.3), (2.0, 1.0)])
def test_equals_a_plain_torch_loop(kappa, momentum):
    data = tiny_data()
    task = tiny_task(f"feddbe(kappa={kappa}, momentum={momentum})", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    server, shifts, common = reference(tiny_net(), pairs(data), plans, 0.1, kappa, momentum)
    run = rounds(task, data, 3)
    torch.testing.assert_close(run.server.parts["feddbe"]["mean"], common, atol=1e-10, rtol=0)
    for k, v in zip(data, shifts, strict=True):
        torch.testing.assert_close(run.states[k].local["head.shift"], v, atol=1e-10, rtol=0)
    wanted = server.state_dict()
    close(run.model.pick(wanted), wanted)


def test_the_first_round_is_fedavgs_bit_for_bit():
    plain, ours = play("fedavg", n=1), play("feddbe", n=1)
    assert same(plain.model, ours.model.pick(plain.model))
    assert not ours.states["a"].local["head.shift"].any()


def test_the_common_mean_is_sent_up_once():
    run = play("feddbe", n=2)
    assert not run.uploads["a"].parts["feddbe"]
    assert list(play("feddbe", n=1).uploads["a"].parts["feddbe"]) == ["mean"]
