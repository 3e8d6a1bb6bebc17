"""The graph engine against the loop, on a GPU: the same method code, the same numbers."""

from __future__ import annotations

import pytest
import torch

from fednorms.core import broadcast, initial_state, server_update
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.engines.store import ClientStore
from fednorms.method import method, names
from fednorms.models import build
from fednorms.net import Net
from fednorms.states import Task
from fednorms.training import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = [
    *names(),
    "scaffold(control='difference')",
    "scaffold(option='I')",
    "mixbn(kind='learned')",
    "mixbn(kind='global')",
    "mixbn(kind='ensemble')",
    "perfedavg(variant=hessian_free)",
    "scaffold + greg + fedfn",
    "fednn + scaffold",
    "greg + fedprox",
    "greg + fedrdn",
    "fedexp + fedfn",
    "fedbn + fedfn",
    "spherefed(loss_kind=ce)",
]


def federation(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k, n in enumerate((22, 17, 24)):
        x = torch.rand(n, 3, 16, 16, generator=generator, dtype=dtype)
        sites.append(Site(f"c{k}", "d", train=Split(x, torch.arange(n) % 4)))
    return Federation("tiny", sites, list("abcd"), Preprocessing.centred(3))


def run(kind, text, rounds, dtype=torch.float64, slots=2, **settings):
    fed = federation(dtype)
    chosen = method(text)
    training = fed
    for p in chosen.parts:
        training = p.arrange(training)
    model = build("cnn-small", classes=4, channels=3, size=16, seed=0)
    net = Net(model, chosen, name="cnn-small", dtype=dtype, device="cuda")
    task = Task(
        net=net,
        training=Training(batch_size=8, lr=0.05, schedule="exp", decay=0.9, **settings),
        rounds=4,
        seed=0,
        clients=len(training.clients),
        samples=sum(len(s.train) for s in training.clients),
        preprocessing=fed.preprocessing,
        needs_two=net.probe(fed.shape, 4),
    )
    engine = kind(task, training, fed, ClientStore(2**30, None))
    if kind is Graphs:
        engine.slot_count = slots
    with numerics("float32", deterministic=True):
        state = engine.setup(initial_state(task))
        for _ in range(rounds):
            state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    return state, {n: engine.store.get(n) for n in engine.clients}


def whole(tree):
    return torch.cat([t.double().flatten() for t in tree.values() if t.is_floating_point()]) if tree else torch.zeros(1)


def distance(a, b):
    left, right = whole(a), whole(b)
    return float((left - right).norm() / left.norm().clamp(min=1e-12))


@pytest.mark.parametrize("text", METHODS)
def test_graphs_equal_the_loop_in_float64(text):
    loop, loop_clients = run(Loop, text, 3)
    fast, fast_clients = run(Graphs, text, 3)
    assert distance(loop.model, fast.model) < 1e-9
    for part, tree in loop.parts.items():
        assert distance(tree, fast.parts[part]) < 1e-9
    for name, state in loop_clients.items():
        if state is None:
            assert fast_clients[name] is None
            continue
        assert distance(state.local, fast_clients[name].local) < 1e-9
        for part, tree in state.parts.items():
            assert distance(tree, fast_clients[name].parts[part]) < 1e-9


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.9, "weight_decay": 1e-3}, {"optimiser": "adamw", "weight_decay": 0.05}, {"clip": 0.5}]
)
def test_optimisers_and_clipping(settings):
    loop, _ = run(Loop, "scaffold", 3, **settings)
    fast, _ = run(Graphs, "scaffold", 3, **settings)
    assert distance(loop.model, fast.model) < 1e-9


def test_repeats_are_bit_identical_whatever_the_number_of_slots():
    a, _ = run(Graphs, "scaffold + greg", 3, torch.float32, slots=1)
    b, _ = run(Graphs, "scaffold + greg", 3, torch.float32, slots=3)
    assert all(torch.equal(a.model[k], b.model[k]) for k in a.model)
