"""SphereFed: an orthonormal head that never moves, and its two losses."""

import math

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from tests.reference.fedavg import average
from tests.support.tiny import close, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task


def head(classes, features, text="spherefed"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, features), nn.Linear(features, classes)).double()
    nn.init.eye_(model[1].weight)  # a body that changes nothing, but is there to be shared
    nn.init.zeros_(model[1].bias)
    return tiny_task(text, tiny_data(), model=model)


def loss_at(task, f, y):
    class Seen:
        logits, _ = task.net.forward(task.net.initial, f, train=True, batch_statistics=True)

    Seen.y = y
    return float(task.method.parts[0].objective(Seen))


def test_rows_are_orthonormal_bias_free_and_never_move():
    run = play("spherefed", n=2, lr=1.0, weight_decay=0.1)
    w = run.model["head.weight"]
    torch.testing.assert_close(w @ w.T, torch.eye(3, dtype=w.dtype), atol=1e-12, rtol=0)
    assert "head.bias" not in run.model
    assert torch.equal(w, tiny_task("spherefed", tiny_data()).net.initial["head.weight"])
    assert "head.weight" not in run.uploads["a"].model


def test_a_feature_along_its_row_has_loss_zero_and_the_closed_form():
    for tau in (1.0, 15.0):
        task = head(100, 128, f"spherefed(loss_kind=ce, temperature={tau})")
        f = 3 * task.net.initial["2.weight"][7:8]
        assert loss_at(task, f, torch.tensor([7])) == pytest.approx(math.log(1 + 99 * math.exp(-tau)), rel=1e-9)
    assert math.log(1 + 99 * math.exp(-1)) == pytest.approx(3.6222, abs=5e-5)
    assert math.log1p(99 * math.exp(-15)) == pytest.approx(3.028e-5, abs=5e-9)
    task = head(100, 128)
    f = 3 * task.net.initial["2.weight"][7:8]
    assert loss_at(task, f, torch.tensor([7])) == pytest.approx(0.0, abs=1e-20)


def test_the_two_reductions_differ_by_the_number_of_classes():
    f, y = torch.randn(6, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    mean, total = (loss_at(head(3, 16, t), f, y) for t in ("spherefed", "spherefed(mse_reduction=sum_over_classes)"))
    task = head(3, 16)
    z = (f / f.norm(dim=1, keepdim=True)) @ task.net.initial["2.weight"].T
    wanted = sum((z[i, c] - float(c == y[i])) ** 2 for i in range(6) for c in range(3)) / 18
    assert mean == pytest.approx(float(wanted), rel=1e-12)
    assert total == pytest.approx(3 * mean, rel=1e-12)


def test_logits_are_cosines_with_a_largest_gap_of_root_two():
    task = head(5, 8)
    f = torch.randn(500, 8, dtype=torch.float64)
    z, _ = task.net.forward(task.net.initial, f, train=True, batch_statistics=True)
    assert z.square().sum(1).max() <= 1 + 1e-12
    assert (z.max(1).values - z.min(1).values).max() <= math.sqrt(2) + 1e-12


@pytest.mark.parametrize("kind", ["mse", "ce"])
def test_equals_a_plain_torch_loop(kind):
    data = tiny_data()
    task = tiny_task(f"spherefed(loss_kind={kind}, temperature=2.0)", data)
    w = task.net.initial["head.weight"]
    states = []
    for (x, y), name in zip(pairs(data), "abc", strict=True):
        local = tiny_net().train()
        body = [*local.conv.parameters(), *local.norm.parameters()]
        optimizer = torch.optim.SGD(body, lr=0.1)
        for rows in plan_of(task, data[name], name, 0):
            optimizer.zero_grad()
            f = local.pool(torch.relu(local.norm(local.conv(x[rows])))).flatten(1)
            z = f / f.norm(dim=1, keepdim=True) @ w.T
            if kind == "ce":
                loss = nn.functional.cross_entropy(2.0 * z, y[rows])
            else:
                loss = nn.functional.mse_loss(z, nn.functional.one_hot(y[rows], 3).double())
            loss.backward()
            optimizer.step()
        states.append({k: v for k, v in local.state_dict().items() if not k.startswith("head.")})
    run = rounds(task, data, 1)
    got = {k: v for k, v in run.model.items() if not k.startswith("head.")}
    close(got, average(states, [float(len(s)) for s in data.values()]))


def test_more_classes_than_features_is_an_error():
    with pytest.raises(BadInput, match=r"spherefed: 5 orthonormal rows do not fit 4 features.*at least as many"):
        head(5, 4)
