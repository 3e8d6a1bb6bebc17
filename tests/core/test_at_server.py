"""Images at the server reach every hook of the server, so other methods with a proxy set need no new hook."""

from dataclasses import replace

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.part import REGISTRY
from fednorms.core.round import server_update
from fednorms.core.tree import Tree
from tests.support.tiny import rounds, same, tiny_data, tiny_net, tiny_task


@pytest.fixture(autouse=True)
def _forget():
    before = dict(REGISTRY)
    yield
    for name in set(REGISTRY) - set(before):
        REGISTRY.pop(name)


def trusting():
    """As FLTrust: the cosine between a client's update and the server's own step, if it is positive."""

    @fn.part("trusting")
    class Trusting(fn.Part):
        requires = frozenset({"proxy"})

        def weigh(self, r):
            point = r.proxy.model.pick(r.context.names(lambda slot: slot.trainable))
            point = point.map(lambda t: t.detach().requires_grad_())
            x, y = next(iter(r.proxy.epoch()))
            loss = r.proxy.loss(fn.Tree({**r.proxy.model, **point}), x, y, 0)
            step = fn.Tree(zip(point, torch.autograd.grad(loss, list(point.values())), strict=True)) * -1.0
            dots = [update.pick(step).dot(step) for update in r.updates]
            return [max(0.0, float(d)) for d in dots], r.mine

    return "trusting"


def distilling():
    """As FedDF: after averaging, a step towards the server's labels, here with the images in their batches."""

    @fn.part("distilling")
    class Distilling(fn.Part):
        requires = frozenset({"proxy"})

        def server(self, delta, r):
            moved = fn.Tree({**r.proxy.model, **(r.model.pick(delta) + delta)})
            point = moved.pick(delta).map(lambda t: t.detach().requires_grad_())
            x, y = next(iter(r.proxy.batches(4)))
            buffers = moved.clone()
            loss = r.proxy.base(r.proxy.logits(fn.Tree({**buffers, **point}), x, 0), y)
            g = fn.Tree(zip(point, torch.autograd.grad(loss, list(point.values())), strict=True))
            return delta - g * 0.1, r.mine

    return "distilling"


def test_a_client_that_goes_the_other_way_gets_no_weight():
    data = tiny_data()
    task = tiny_task(trusting(), data)
    run = rounds(task, data, 1)
    start = replace(run.server, round=0, model=task.net.initial)
    uploads = list(run.uploads.values())
    away = {n: 2 * task.net.initial[n] - t if t.is_floating_point() else t for n, t in uploads[2].model.items()}
    away["norm.running_var"] = uploads[2].model["norm.running_var"]
    without = server_update(task, start, uploads[:2])
    assert same(without.model, server_update(task, start, [*uploads[:2], replace(uploads[2], model=Tree(away))]).model)


def test_a_server_step_may_use_them_and_describe_knows():
    data = tiny_data()
    run = rounds(tiny_task(distilling(), data), data, 1)
    plain = rounds(tiny_task("fedavg", data), data, 1)
    assert not same(run.model, plain.model)
    assert same(run.uploads["a"].model, plain.uploads["a"].model)
    assert fn.describe("distilling", tiny_net(), classes=3, shape=(3, 8, 8)).proxy == ("distilling",)


def test_a_part_that_did_not_ask_is_told_how():
    @fn.part("forgetful")
    class Forgetful(fn.Part):
        def server(self, delta, r):
            return delta * float(len(list(r.proxy.images()))), r.mine

    data = tiny_data()
    with pytest.raises(BadInput, match=r'`proxy` is only for parts that request it. Set requires = .*"proxy"'):
        rounds(tiny_task("forgetful", data), data, 1)


def test_a_test_time_rule_may_only_change_tensors_of_the_model():
    from fednorms.evaluation.modes import Mode
    from tests.support.after import trained

    @fn.part("renaming")
    class Renaming(fn.Part):
        def evaluation(self):
            return fn.Eval(adapt=lambda batch, memory: (fn.Tree(other=batch.x), memory))

    session, state = trained("renaming", 1)
    with pytest.raises(BadInput, match=r'renaming: adapt of evaluation .*"other"'):
        session.engine.evaluate(state, Mode("global"), "abc")
