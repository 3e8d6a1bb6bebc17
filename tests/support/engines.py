"""A method, a tiny network and an engine on a given federation, in float64, for tests of engines."""

from __future__ import annotations

import torch

from fednorms.core.net import Net
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.engines.base import DEFAULTS
from fednorms.methods.registry import method
from fednorms.runs.store.clients import ClientStore
from tests.support.tiny import TinyNet, proxy_for

# Options that these need on such a small network.
FITTING = {"gn": "gn(groups=2)", "fedfa": 'fedfa(after="pool")', "fedwsq": "fedwsq(first=true)"}


def engine_of(kind, text, fed, *, training=None, model=TinyNet, settings=DEFAULTS, **options):
    """The task and the engine of that kind, with its options."""
    training = training or Training(batch_size=8, lr=0.05, schedule="exp", decay=0.9)
    chosen = method(text).settled(training)
    arranged = fed
    for p in chosen.parts:
        arranged = p.arrange(arranged)
    torch.manual_seed(0)
    net = Net(model(), chosen, name="tiny", dtype=torch.float64)
    task = Task(
        net=net,
        training=training,
        rounds=4,
        seed=0,
        clients=len(arranged.clients),
        samples=sum(len(s.train) for s in arranged.clients),
        preprocessing=fed.preprocessing,
        needs_two=net.probe(fed.shape, 3),
        proxy=proxy_for(net),
    )
    return task, kind(task, arranged, fed, ClientStore(2**30), settings, **options)
