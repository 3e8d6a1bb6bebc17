"""The optimizer against torch.optim, clipping, kept momentum."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.optim import Optimizer, clipped, made_by
from fednorms.core.part import Phase
from fednorms.core.round import begin, broadcast, enter, initial_state
from fednorms.core.states import Client, ClientState, Task
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.methods.registry import method
from tests.support.tiny import close, plan_of, play, rounds, tiny_data, tiny_net, tiny_task


def drive(settings, make, steps=7, clip=None, dtype=torch.float64):
    """The same gradients through ours and torch's optimizer."""
    torch.manual_seed(0)
    start = {"w": torch.randn(3, 4, dtype=dtype), "b": torch.randn(3, dtype=dtype)}
    ours = Tree(start).clone()
    theirs = {k: v.clone().requires_grad_() for k, v in start.items()}
    training = Training(**settings)
    optimizer = Optimizer.fresh(training, ours, training.lr, ours["w"])
    reference = make(theirs.values())
    for _ in range(steps):
        g = Tree({k: torch.randn_like(v) for k, v in start.items()})
        for k, p in theirs.items():
            p.grad = g[k].clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
            g = clipped(g, clip)
        reference.step()
        optimizer.update(ours, g)
    close(ours, {k: v.detach() for k, v in theirs.items()}, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sgd_is_torchs(momentum, decay, clip, dtype):
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": decay}
    drive(settings, lambda p: torch.optim.SGD(p, **settings), clip=clip, dtype=dtype)


def test_a_gradient_may_have_another_memory_layout_than_its_weights():
    w = torch.arange(24.0).reshape(2, 3, 2, 2)
    g = torch.randn(2, 3, 2, 2)
    for weights, gradient in [(w, g.contiguous(memory_format=torch.channels_last)), (w.transpose(0, 3), g.mT)]:
        params = Tree(w=weights.clone())
        want = params["w"] - 0.5 * gradient
        Optimizer.fresh(Training(lr=0.5), params, 0.5, w).update(params, Tree(w=gradient))
        torch.testing.assert_close(params["w"], want)


def test_a_gradient_may_be_of_another_dtype_than_its_weights():
    params = Tree(w=torch.ones(3))
    Optimizer.fresh(Training(lr=0.5), params, 0.5, params["w"]).update(params, Tree(w=torch.ones(3).double()))
    assert params["w"].tolist() == [0.5, 0.5, 0.5]


def test_a_kept_velocity_may_have_another_memory_layout_than_its_weights():
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), method("fedavg"))
    training = Training(lr=0.5, momentum=0.5, keep_momentum=True)
    task = Task(net, training, 1, 0, 1, 8)
    velocity = torch.arange(12.0).reshape(4, 3).T  # for example after it was read from disk
    state = ClientState(1, Tree(), {}, Tree({"1.weight": velocity}))
    client = Client("a", Split(torch.zeros(8, 1, 2, 2), torch.zeros(8, dtype=torch.long)), state)
    carry, _ = begin(task, broadcast(task, initial_state(task)), client)
    enter(task, carry, Phase(epochs=1))
    before = carry.params["1.weight"].detach().clone()
    with torch.no_grad():
        carry.optimizer.update(carry.params, Tree({"1.weight": torch.zeros(3, 4)}))
    torch.testing.assert_close(carry.params["1.weight"].detach(), before - 0.5 * 0.5 * velocity)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_adamw_is_torchs(decay):
    settings = {"lr": 0.01, "weight_decay": decay}
    drive({**settings, "optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, **settings))


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_adam_is_torchs(decay, clip):
    settings = {"lr": 0.01, "weight_decay": decay}
    drive({**settings, "optimizer": "adam"}, lambda p: torch.optim.Adam(p, **settings), clip=clip)


# -- custom optimizers --------------------------------------------------------------------------------------------
def rmsprop(params, lr, weight_decay=0.0):
    return torch.optim.RMSprop(params, lr=lr, alpha=0.9, weight_decay=weight_decay)


def test_a_custom_optimizer_gives_torchs_model():
    data = tiny_data(8)
    settings = {"optimizer": "custom:rmsprop@12", "weight_decay": 0.01, "schedule": "exp", "decay": 0.5, "lr": 0.01}
    task = replace(tiny_task("fedavg", data, **settings), optimizer=rmsprop)
    model = tiny_net().train()
    for t in range(2):  # it starts fresh in every round, at the round's rate
        optimizer = rmsprop(model.parameters(), lr=0.01 * 0.5**t, weight_decay=0.01)
        for rows in plan_of(task, data["a"], "a", t):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data["a"].x[rows]), data["a"].y[rows]).backward()
            optimizer.step()
    close(rounds(task, data, 2).model, model.state_dict())


def test_a_custom_optimizer_leaves_tensors_without_a_gradient_alone():
    task = replace(tiny_task("fedbabu", tiny_data(8), optimizer="custom:rmsprop@12", lr=0.01), optimizer=rmsprop)
    run = rounds(task, tiny_data(8), 1)
    assert torch.equal(run.model["head.weight"], tiny_net().head.weight)
    assert not torch.equal(run.model["conv.weight"], tiny_net().conv.weight)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), {}, 'takes no argument "lr". Write a function such as'),
        (torch.optim.Adam, {"momentum": 0.9}, '"Adam" takes no argument "momentum". Leave momentum out'),
        (torch.optim.LBFGS, {}, "needs a closure"),
        (lambda params, lr: params, {}, "must make a torch.optim.Optimizer, got list"),
    ],
)
def test_what_does_not_make_an_optimizer_is_refused(make, settings, words):
    with pytest.raises(BadInput, match=words):
        made_by(make, Training(**settings), [torch.zeros(1)], 0.1)


def test_training_on_without_the_custom_optimizer_is_refused():
    data = tiny_data(8)
    with pytest.raises(BadInput, match='custom optimizer \\("rmsprop@12"\\), which is needed'):
        rounds(tiny_task("fedavg", data, optimizer="custom:rmsprop@12"), data, 1)


@pytest.mark.parametrize("clip", [0.1, 3.0, 1e9])
def test_clipping_is_torchs(clip):
    g = Tree(w=torch.randn(5, 2, dtype=torch.float64), b=torch.randn(2, dtype=torch.float64))
    p = [v.clone().requires_grad_() for v in g.values()]
    for tensor, v in zip(p, g.values(), strict=True):
        tensor.grad = v.clone()
    torch.nn.utils.clip_grad_norm_(p, clip)
    for tensor, v in zip(p, clipped(g, clip).values(), strict=True):
        torch.testing.assert_close(v, tensor.grad, atol=1e-12, rtol=0)
    assert clipped(Tree(), 1.0) == {}


def test_tensors_without_a_gradient_stay_even_under_weight_decay():
    w = Tree(a=torch.ones(2), b=torch.ones(2))
    training = Training(lr=0.1, weight_decay=0.5, momentum=0.9)
    Optimizer.fresh(training, w, 0.1, w["a"]).update(w, Tree(a=torch.ones(2)))
    assert w["b"].tolist() == [1.0, 1.0]
    assert w["a"].tolist() != [1.0, 1.0]


def test_weight_decay_comes_after_clipping():
    # With a gradient clipped to nothing only the decay moves the weights.
    data = tiny_data(4)
    still = play("fedavg", data, n=1, lr=0.1, clip=1e-12, weight_decay=0.5)
    start = tiny_net().conv.weight.detach()
    torch.testing.assert_close(still.model["conv.weight"], start * (1 - 0.05), atol=1e-9, rtol=0)


def test_momentum_starts_at_zero_every_round_unless_kept():
    data = tiny_data(8)
    fresh, kept = (play("fedavg", data, n=2, momentum=0.9, keep_momentum=k) for k in (False, True))
    one, other = (play("fedavg", data, n=1, momentum=0.9, keep_momentum=k) for k in (False, True))
    close(one.model, other.model, atol=0)  # the first round has nothing to keep
    assert not torch.equal(fresh.model["conv.weight"], kept.model["conv.weight"])
    assert not fresh.states["a"].velocity
    assert kept.states["a"].velocity


def test_kept_momentum_is_one_long_run_of_torchs_sgd():
    data = tiny_data(8)
    task = tiny_task("fedavg", data, momentum=0.9, keep_momentum=True)
    model = tiny_net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for t in range(3):
        for rows in plan_of(task, data["a"], "a", t):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data["a"].x[rows]), data["a"].y[rows]).backward()
            optimizer.step()
    close(play("fedavg", data, n=3, momentum=0.9, keep_momentum=True).model, model.state_dict())


def test_kept_momentum_covers_every_phase():
    run = play("fedrep(head_epochs=1)", tiny_data(8), n=1, momentum=0.9, keep_momentum=True)
    assert run.states["a"].velocity.keys() == {n for n, _ in tiny_net().named_parameters()}
