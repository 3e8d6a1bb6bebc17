"""A network, clients and a round loop so small that a test can afford many of them; all in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.batches import batch_plan
from fednorms.core.net import Net
from fednorms.core.part import Phase
from fednorms.core.passes import LocalView, passes
from fednorms.core.reductions import reduce_uploads
from fednorms.core.round import broadcast, initial_state, load, local_update, own_state, server_update
from fednorms.core.states import Client, ClientState, ServerState, Task, Upload, context_of
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.data import Split
from fednorms.methods.registry import method

CLASSES = 3


class TinyNet(nn.Module):
    """conv(3 -> 4) + BN + ReLU + pool + Linear on 8x8 images; no name has the letters "bn" in it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1))


class Scalar(nn.Module):
    """The model z = w: a head of one weight over the constant image 1, for losses known in closed form."""

    def __init__(self, w: float = 1.0):
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.head.weight, w)

    def forward(self, x):
        return self.head(x.flatten(1))


def tiny_net(seed: int = 0, dtype: torch.dtype = torch.float64) -> TinyNet:
    torch.manual_seed(seed)
    return TinyNet().to(dtype)


def tiny_data(*sizes: int, seed: int = 0) -> dict[str, Split]:
    """Clients "a", "b", ... whose images differ in brightness and contrast."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for k, n in enumerate(sizes or (11, 7, 10)):
        y = torch.randint(CLASSES, (n,), generator=generator)
        x = torch.rand(n, 3, 8, 8, generator=generator, dtype=torch.float64)
        x = (0.5 + 0.5 * k) * x + 0.4 * k + 0.3 * y.view(-1, 1, 1, 1)
        out["abcdefgh"[k]] = Split(x, y)
    return out


def ones(*sizes: int) -> dict[str, Split]:
    """Clients of constant 1x1 images for `Scalar`; the label is the client's number."""
    made = {}
    for k, n in enumerate(sizes):
        y = torch.full((n,), k, dtype=torch.int64)
        made["abcdefgh"[k]] = Split(torch.ones(n, 1, 1, 1, dtype=torch.float64), y)
    return made


def tiny_task(text, data, *, model=None, rounds=4, seed=0, dtype=torch.float64, **settings) -> Task:
    """A task; `settings` are fields of Training, except loss, weighting, preprocessing and proxy."""
    own = {k: settings.pop(k) for k in ("loss", "weighting", "preprocessing", "proxy") if k in settings}
    training = Training(**{"lr": 0.1, "batch_size": 4, **settings})
    net = Net(model or tiny_net(), method(text).settled(training), dtype=dtype)
    samples = sum(len(split) for split in data.values())
    return Task(net, training, rounds, seed, clients=len(data), samples=samples, **{"proxy": proxy_for(net), **own})


def proxy_for(net: Net) -> Split | None:
    """Images at the server, for methods that need some."""
    return tiny_data(9, seed=5)["a"] if net.method.using_proxy else None


@dataclass
class Run:
    """What a federated run left behind."""

    server: ServerState
    states: dict[str, ClientState] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)

    @property
    def model(self) -> Tree:
        return self.server.model


def setup(task: Task, data: dict[str, Split]) -> Run:
    """The state before round 0, after the methods' setup passes."""
    run = Run(initial_state(task))
    for p, job in passes(task, "setup"):
        trees = []
        for name, split in data.items():
            client, sent = Client(name, split, run.states.get(name)), broadcast(task, run.server).to(name)
            mine = own_state(task, sent, client.state)
            view = LocalView(task, p, client, sent.model, context_of(task, 0, client), sent, mine)
            keep, up = job.client(view)
            known = client.state.parts if client.state else {}
            run.states[name] = ClientState(0, Tree(), {**known, p.name: keep})
            trees.append(up)
        here = Round(run.model, Tree(), Tree(), len(data), task.clients, context_of(task, 0, None))
        pooled = job.server(reduce_uploads(trees, [1.0] * len(trees), job.reduce), here)
        run.server = replace(run.server, parts={**run.server.parts, p.name: pooled})
    return run


def rounds(task: Task, data: dict[str, Split], n: int, *, run: Run | None = None, cohorts=None) -> Run:
    """`n` rounds of the method; `cohorts[t]` names round t's participants (default: all)."""
    run = run or setup(task, data)
    run = Run(run.server, dict(run.states))
    for t in range(n):
        sent = broadcast(task, run.server)
        run.uploads = {}
        for name in cohorts[t] if cohorts else data:
            client = Client(name, data[name], run.states.get(name))
            run.uploads[name], run.states[name] = local_update(task, sent, client)
        run.server = server_update(task, run.server, list(run.uploads.values()))
    return run


def client_model(task: Task, data: dict[str, Split], run: Run, name: str) -> Tree:
    """What a client holds after it loaded the server's latest model."""
    sent = broadcast(task, run.server).to(name)
    client = Client(name, data[name], run.states.get(name))
    mine = own_state(task, sent, client.state)
    return load(task, sent, client, context_of(task, sent.round, client), mine)


def play(text, data=None, n: int = 2, *, cohorts=None, **settings) -> Run:
    """`rounds` of a task made on the spot."""
    data = data or tiny_data()
    return rounds(tiny_task(text, data, **settings), data, n, cohorts=cohorts)


def plan_of(task: Task, split: Split, name: str, t: int, phase: int = 0, epochs: int | None = None):
    """The row order of a client's phase, for references that re-implement a round."""
    seed = noise.seed_of("data", task.seed, t, name, phase)
    training = task.training
    asked = Phase(epochs=epochs or training.epochs, steps=None if epochs else training.steps)
    return [rows.tolist() for rows in batch_plan(len(split), training, asked, seed)[0]]


def pairs(data: dict[str, Split]):
    """The clients as plain tensors, for the references."""
    return [(split.x, split.y) for split in data.values()]


def same(a: dict, b: dict) -> bool:
    """Equal keys and equal tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: dict, b: dict, atol: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
