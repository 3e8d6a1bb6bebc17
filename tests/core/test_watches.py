"""`watches`: the inputs of layers in a loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.part import Part, part
from fednorms.methods.registry import method
from tests.reference.fedavg import average
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


@pytest.fixture(autouse=True)
def tidy(parts_as_before):
    pass


def own(name="own", **hooks):
    return part(name)(type(name.title(), (Part,), hooks))()


def small(self, s):
    """Keep what the norm gets small, and near to what it got at first on average."""
    start = s.start_buffers["norm.running_mean"].view(-1, 1, 1)
    return (s.inputs["norm"] - start).square().mean()


def is_norm(self, module):
    return isinstance(module, nn.BatchNorm2d)


@pytest.mark.parametrize("host", [None, "scaffold(option='I')"])
def test_a_loss_of_inputs_is_the_one_of_a_plain_loop(host):
    """With a host that takes the full gradient, the term is there, too: without it, the two would end alike."""
    data = tiny_data()
    made = own(loss=small, watches=is_norm)
    if host is not None:
        without = own("without", watches=is_norm)
        assert not same(play(made + method(host), data).model, play(without + method(host), data).model)
        return
    task = tiny_task(made, data)
    net = tiny_net()
    for t in range(2):
        states = []
        for (k, split), (x, y) in zip(data.items(), pairs(data), strict=True):
            local = tiny_net()
            local.load_state_dict(net.state_dict())
            first = local.norm.running_mean.clone().view(-1, 1, 1)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            for rows in plan_of(task, split, k, t):
                optimizer.zero_grad()
                z = local.conv(x[rows])
                logits = local.head(local.pool(torch.relu(local.norm(z))).flatten(1))
                (nn.functional.cross_entropy(logits, y[rows]) + (z - first).square().mean()).backward()
                optimizer.step()
            states.append(local.state_dict())
        net.load_state_dict(average(states, [float(len(s)) for s in data.values()]))
    close(rounds(task, data, 2).model, net.state_dict())


def test_nothing_is_noted_unless_asked_for():
    seen = []
    play(own(loss=lambda self, s: seen.append(dict(s.inputs)) or 0.0), n=1)
    assert seen
    assert not any(seen)


def test_layers_of_all_parts_are_noted_and_no_hook_stays_on_the_net():
    seen = []
    one = own("one", watches=lambda self, m: isinstance(m, nn.Conv2d))
    two = own("two", watches=is_norm, loss=lambda self, s: seen.append(sorted(s.inputs)) or 0.0)
    task = tiny_task(one + two, tiny_data())
    rounds(task, tiny_data(), 1)
    assert seen[0] == ["conv", "norm"]
    assert not task.net.module.norm._forward_pre_hooks


def test_a_wrong_answer_names_the_part():
    with pytest.raises(BadInput, match="own: watches must return True or False, got NoneType"):
        play(own(watches=lambda self, m: None), n=1)
