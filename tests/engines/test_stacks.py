"""Clients that take their steps together (stacks) give the loop's results, with the CPU as the device."""

from __future__ import annotations

from dataclasses import replace
from inspect import getclosurevars

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednorms.core.errors import Diverged
from fednorms.core.optim import Optimizer
from fednorms.core.round import broadcast, initial_state
from fednorms.core.stacked import above, level_of
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Split
from fednorms.engines.base import PROVIDES, EngineSettings
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs
from fednorms.engines.graphs.capture import CpuDevice
from fednorms.engines.graphs.grouping import Grouping, Trials
from fednorms.engines.graphs.stack import _no_slow_rules
from fednorms.engines.graphs.stacked_ops import StackedOperations
from fednorms.engines.loop import Loop
from fednorms.methods.registry import method, names
from tests.engines.test_graphs_on_host import COMBINATIONS, assert_same, distance, federation, play, setting
from tests.support.addressed import halfway
from tests.support.engines import FITTING
from tests.support.tiny import TinyNet

ALIKE = federation((17, 17, 22, 17))  # three clients are alike: two stacks of two, one of them half full


def compared(text, fed=ALIKE, **options):
    """Three rounds of the loop and of stacks: the task, both final states, both engines."""
    device = options.pop("device", None)
    task, fast = setting(Graphs, text, streams=2, together=2, fed=fed, device=device, **options)
    _, loop = setting(Loop, text, fed=fed, **options)
    return task, play(task, loop), play(task, fast), loop, fast


@pytest.mark.parametrize("text", [*names(), *COMBINATIONS])
def test_stacks_give_the_loops_results(text):
    text = FITTING.get(text, text)
    if any(p.requires - PROVIDES["graphs"] for p in method(text).parts):
        return
    task, slow, fast, loop, engine = compared(text)
    if "fedheal" in text:  # it counts signs of updates, and a bias before BatchNorm moves by rounding errors only
        assert distance(slow.model, fast.model) < 1e-9
    else:
        assert_same(task, slow, fast, loop, engine)
    assert engine.stacks.spaces or task.twin or task.method.writing or task.clients == 1
    assert not engine.notes, engine.notes


@pytest.mark.parametrize("text", ["test_halfway", "fedala"])
@pytest.mark.parametrize("first", [[0], [1]])
def test_clients_that_are_sent_or_keep_other_trees_than_their_neighbours(text, first):
    """A client that is new has no tree of its own from the server, or has learned nothing yet."""
    results, fed = [], federation((17, 17, 17))
    with halfway() as part:
        chosen = part if text == part.name else text
        for engine, options in ((Loop, {}), (Graphs, {"streams": 1, "together": 2})):
            task, found = setting(engine, chosen, fed=fed, **options)
            state, names = found.setup(initial_state(task)), list(found.clients)
            for cohort in ([names[k] for k in first], names[:2], names):
                state = found.average(state, found.train(broadcast(task, state), cohort))
            results.append(state)
    assert distance(results[0].model, results[1].model) < 1e-12


@pytest.mark.parametrize(
    "training",
    [
        Training(batch_size=8, momentum=0.9, weight_decay=1e-3),
        Training(batch_size=8, momentum=0.9, keep_momentum=True),
        Training(batch_size=8, optimizer="adamw", lr=1e-3, weight_decay=0.05),
        Training(batch_size=8, clip=0.5),
        Training(batch_size=8, warmup=2, client_epochs={"c1": 3}),
        Training(batch_size=5, last="fill", epochs=2),
        Training(batch_size=8, steps=3),
    ],
)
@pytest.mark.parametrize("text", ["scaffold", "fedrep", "fraug"])
def test_every_way_of_local_training(training, text):
    task, slow, fast, loop, engine = compared(text, training=training)
    assert engine.stacks.spaces
    assert_same(task, slow, fast, loop, engine)


class Mixed(nn.Module):
    """Layers with rules of their own: strided, dilated and grouped convolutions, dropout, attention."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 4, (3, 1), padding=(2, 0), dilation=(2, 1), bias=False)
        self.grouped = nn.Conv2d(4, 4, 3, padding="same", groups=2)
        self.norm, self.drop = nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.shared, self.scale = nn.LayerNorm(4), nn.Linear(4, 12)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.grouped(self.second(self.first(x))))))
        q, k, v = self.scale(self.shared(x.flatten(2).mT)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("text", ["fedavg", "fedbn", "gn(groups=2)", "ln", "fedprox + fedbn"])
def test_layers_of_many_kinds(text):
    task, slow, fast, loop, engine = compared(text, model=Mixed)
    assert engine.stacks.spaces
    assert not engine.notes
    assert_same(task, slow, fast, loop, engine)


def test_a_clients_result_does_not_depend_on_the_others_of_its_stack():
    models = []
    for fed in (ALIKE, federation((17, 17, 22, 17))):
        task, engine = setting(Graphs, "fedbn", streams=1, together=3, fed=fed)
        play(task, engine)
        models.append({n: engine.store.get(n).local for n in engine.clients})
    assert all(torch.equal(models[0][n][k], models[1][n][k]) for n in models[0] for k in models[0][n])


class Peeking(TinyNet):
    """A network that reads a value on the host, which no stack can."""

    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) > -1e9 else x


def test_what_cannot_be_stacked_runs_one_by_one_and_is_noted():
    task, slow, fast, loop, engine = compared("scaffold", model=Peeking)
    assert_same(task, slow, fast, loop, engine)
    assert any("one by one" in note for note in engine.notes)
    assert not engine.stacks.spaces


class Small(CpuDevice):
    """A device without memory for a stack."""

    def record(self, job, stream, pool):
        if getclosurevars(job).nonlocals["space"].count > 1:
            raise torch.OutOfMemoryError("no room")
        return super().record(job, stream, pool)


def test_without_memory_for_a_stack_clients_run_one_by_one():
    task, slow, fast, loop, engine = compared("fedbn", device=Small())
    assert_same(task, slow, fast, loop, engine)
    assert any("out of memory" in note for note in engine.notes)


@pytest.mark.parametrize("deterministic", [True, False])
def test_only_runs_that_need_not_repeat_try_stacks(deterministic):
    with numerics("float64", deterministic=deterministic):
        task, engine = setting(Graphs, "fedavg", fed=ALIKE)
        _, loop = setting(Loop, "fedavg", fed=ALIKE)
        assert distance(play(task, loop, 12).model, play(task, engine, 12).model) < 1e-9
    tried = {g.together for g in engine.trials.seconds}
    assert tried == ({1} if deterministic else {1, 2, 4})


def test_cohorts_of_many_sizes_do_not_start_new_trials_for_ever():
    trials, tried = Trials(pixels=1, model_bytes=1, stackable=True), []
    now = Grouping(1, 8)
    with numerics("float64", deterministic=False):
        for number in range(60):
            cohort = 40 - number % 7
            trials.clients = max(trials.clients, cohort)
            now = trials.next(now, 1.0 / now.together, compiling=False, fits=lambda g: True)
            tried.append(now)
    assert len(set(tried[20:])) == 1


def test_a_client_that_diverges_in_a_stack_is_named_as_in_the_loop():
    told = []
    for kind, how in ((Loop, {}), (Graphs, {"streams": 1, "together": 2})):
        task, engine = setting(kind, "fedavg", fed=ALIKE, training=Training(batch_size=8, lr=1e300), **how)
        with pytest.raises(Diverged) as caught:
            play(task, engine)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert not engine.notes


# -- what a hook may ask of stacked tensors ---------------------------------------------------------------------------
ROWS = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3)  # of three clients


def stacked(f):
    """The results of f for three clients that are stacked, and one by one."""
    weights = ROWS.clone().requires_grad_()

    def one(x):
        with StackedOperations():
            return f(above(weights, level_of(x)), x)

    single = torch.stack([f(w.detach().requires_grad_(), x) for w, x in zip(ROWS, ROWS, strict=True)])
    return torch.func.vmap(one)(ROWS.clone()), single


ASKED = {
    "grad_fn": lambda w, x: x * (1.0 if (w * x).grad_fn is None else 2.0),
    "is_leaf": lambda w, x: x * (1.0 if (w * x).is_leaf else 2.0),
    "version": lambda w, x: (t := x.clone()).add_(t._version) + t._version,
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_stack_answers_what_a_hook_asks_of_a_tensor(ask):
    found, expected = stacked(ask)
    assert torch.equal(found, expected)


def test_the_slope_of_a_tensor_that_clients_share_is_refused():
    def shift(w, x):  # each client's slope is x; the slope of their sum would be the sum of all
        same = torch.zeros(3, dtype=x.dtype, requires_grad=True)
        return torch.autograd.grad((same * x).sum(), same)[0]

    with pytest.raises(NotImplementedError, match="share"):
        stacked(shift)


def test_moving_towards_one_number_per_client_has_no_stacked_rule():
    # Three entries and three clients: rows must not meet columns.
    with pytest.raises(RuntimeError, match="lerp_"), _no_slow_rules():
        stacked(lambda w, x: x.clone().lerp_(x.sum(), 0.5))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_that_clients_share_moves_each_of_them(momentum):
    weights, g = ROWS.float(), torch.tensor([1.0, 2.0, 3.0])
    optimizer = Optimizer.fresh(Training(momentum=momentum), Tree(w=weights), 0.5, torch.zeros(()))

    def one(x):
        lifted = replace(optimizer, first_moment=optimizer.first_moment.map(lambda t: above(t, level_of(x))))
        with StackedOperations():
            lifted.update(Tree(w=above(weights, level_of(x))), Tree(w=g))
        return x

    torch.func.vmap(one)(torch.zeros(3))
    assert torch.equal(weights, ROWS.float() - 0.5 * g)


@pytest.mark.parametrize("left", [1, 2])
def test_a_stacks_first_client_may_be_left_out(left):
    sites = [replace(s) for s in federation((17,) * (left + 1)).sites]
    sites[0] = replace(sites[0], train=Split(sites[0].train.x * 1e300, sites[0].train.y))
    fed = Federation("tiny", sites, list("abc"), Preprocessing.centered(3))
    found = []
    for kind, how in ((Loop, {}), (Graphs, {"streams": 1, "together": left + 1})):
        task, engine = setting(kind, "fedavg", fed=fed, settings=EngineSettings(on_divergence="skip"), **how)
        found.append(play(task, engine))
    assert engine.stacks.spaces
    assert distance(found[0].model, found[1].model) < 1e-9
