"""Every ordered pair of methods on a network and a federation so small that all of them can be tried."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Literal

import torch

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import REGISTRY, SUMS
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import ClientState, ServerState, Task
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import Mode, headline
from fednorms.methods.registry import method, names
from fednorms.runs.store.clients import ClientStore
from tests.support.tiny import CLASSES, proxy_for, tiny_data, tiny_net

# Options for the tiny network: it has four channels and one stage, and tests need few epochs.
FITTING = {
    "gn": "gn(groups=2)",
    "fedrep": "fedrep(head_epochs=1)",
    "fedfa": "fedfa(after='pool')",
    "fedwsq": "fedwsq(first=true)",
    "finetune": "finetune(epochs=1)",
}
# With these settings a part changes nothing, bit for bit.
NEUTRAL = {
    "adabn": "adabn",  # tests differently, trains as before
    "agc": "agc(clip=inf)",
    "alignstats": "alignstats(lam=0)",
    "apfl": "apfl",  # a second model next to the first
    "dplocal": "dplocal(clip=inf, noise=0)",
    "ditto": "ditto",  # a second model next to the first
    "fedavg": "fedavg",
    "fedacg": "fedacg(lam=0, beta=0)",
    "fedavgm": "fedavgm(beta=0)",
    "feddecorr": "feddecorr(beta=0)",
    "fedfa": "fedfa(after='pool', p=0)",
    "fedfr": "fedfr(mu=0)",
    "fediir": "fediir(penalty=0)",
    "fedlc": "fedlc(tau=0)",
    "fedlesam": "fedlesam(rho=0)",
    "fedntd": "fedntd(beta=0)",
    "fedplvm": "fedplvm(lam=0)",
    "fedprox": "fedprox(mu=0)",
    "fedsam": "fedsam(rho=0)",
    "finetune": "finetune(epochs=0)",
    "fixbn": "fixbn(switch=1)",
    "fpl": "fpl(lam=0)",
    "greg": "greg(alpha=0, rho=1)",
    "maxweight": "maxweight(share=1)",
    "moon": "moon(mu=0)",
    "normbound": "normbound(relative=1e9)",
}


def known() -> list[str]:
    """The library's own names; another test may have registered a custom part."""
    return [n for n in names() if n not in REGISTRY or REGISTRY[n].__module__.startswith("fednorms.methods.")]


def fitting(name: str) -> str:
    return FITTING.get(name, name)


def parts_of(name: str) -> list[str]:
    """The parts behind a name: a sum has several, FedAvg none."""
    return [p.name for p in SUMS[name]()] if name in SUMS else [name] if name in REGISTRY else []


def ordered(firsts: list[str] | None = None, seconds: list[str] | None = None) -> list[tuple[str, str]]:
    return list(itertools.product(firsts or known(), seconds or known()))


def some(pairs: list[tuple[str, str]], n: int) -> list[tuple[str, str]]:
    """`n` of the pairs, chosen by a hash of their names: a new method does not reshuffle the others."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(" + ".join(pair).encode()).digest())[:n]


def federation() -> Federation:
    """Two clients of two modalities, whose labels disagree, and a site that never trains."""
    sites = []
    for (name, split), modality in zip(tiny_data(8, 7, 5).items(), ("CT", "MRI", "CT"), strict=True):
        train = Split(split.x, (split.y + (name == "b")) % CLASSES) if name != "c" else None
        sites.append(Site(name, name, train=train, test=tiny_data(3)["a"], attributes={"modality": modality}))
    return Federation("pair", sites, [str(c) for c in range(CLASSES)], Preprocessing())


@dataclass
class Trial:
    """A method ready to train."""

    task: Task
    engine: Loop

    @classmethod
    def compose(cls, text: str) -> Trial:
        """All checks before training; raises BadInput if parts do not combine."""
        settings = Training(lr=0.1, batch_size=4, momentum=0.5, weight_decay=0.01, clip=10.0)
        chosen = method(text).settled(settings)
        given = training = federation()
        for p in chosen.parts:
            training = p.arrange(training)
        net = Net(tiny_net(), chosen, name="tiny", dtype=torch.float64)
        net.probe(given.shape, given.num_classes)
        clients = [s.train for s in training.clients if s.train is not None]
        images, proxy = sum(map(len, clients)), proxy_for(net)
        task = Task(net, settings, rounds=2, seed=0, clients=len(clients), samples=images, proxy=proxy)
        chosen.weighting()
        headline(task)
        return cls(task, Loop(task, training, given, ClientStore(2**30, None)))

    def train(self, rounds: int = 2) -> Outcome:
        """Train with all clients."""
        state = self.engine.setup(initial_state(self.task))
        for _ in range(rounds):
            done = self.engine.train(broadcast(self.task, state), self.engine.clients)
            state = server_update(self.task, state, done.uploads)
        return Outcome(state, {n: self.engine.store.get(n) for n in self.engine.clients})

    def test(self, outcome: Outcome) -> list[float]:
        """The losses of every evaluation mode of this method."""
        modes = [headline(self.task), Mode("unseen")]
        if self.task.method.evaluation().phases:
            modes.append(Mode("adapted"))
        scores = [self.engine.evaluate(outcome.server, mode, self.engine.clients) for mode in modes]
        return [site.loss for score in scores if score for site in score.sites.values()]


@dataclass
class Outcome:
    """What a trial left behind."""

    server: ServerState
    clients: dict[str, ClientState | None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of server and clients by owner, part and name."""
        found: dict[str, Tree] = {"server": self.server.model}
        found |= {f"server {part}": tree for part, tree in self.server.parts.items()}
        for name, state in self.clients.items():
            if state is not None:
                found |= {f"{name}": state.local, f"{name} velocity": state.velocity}
                found |= {f"{name} {part}": tree for part, tree in state.parts.items()}
        return {f"{owner}: {k}": t for owner, tree in found.items() for k, t in tree.items()}


Order = Literal["either", "matters", "first", "second", "refused"]


def order_of(a: str, b: str) -> Order:
    """Whether a + b is b + a: after two rounds every tensor and every test loss agree up to rounding.

    "first" and "second": only a + b, or only b + a, can be composed; "refused": neither.
    """
    found = []
    for text in (f"{fitting(a)} + {fitting(b)}", f"{fitting(b)} + {fitting(a)}"):
        try:
            trial = Trial.compose(text)
        except BadInput:
            found.append(None)
            continue
        outcome = trial.train()
        losses = torch.tensor(trial.test(outcome), dtype=torch.float64)
        found.append({**outcome.tensors(), "test losses": losses})
    one, other = found
    if one is None or other is None:
        return "refused" if one is other else "first" if other is None else "second"
    return "either" if one.keys() == other.keys() and all(_close(t, other[k]) for k, t in one.items()) else "matters"


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-9, rtol=1e-9)
