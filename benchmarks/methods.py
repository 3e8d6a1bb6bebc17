"""Time of a local step of every method relative to FedAvg, on LeNet, in one process and taking turns with FedAvg.

A step should cost what its passes cost. The column "passes" has how many forward passes with a gradient a step takes (+
those without, which count a third, as there is no backward pass); "network" is the time of one such pass, forward and
backward, relative to FedAvg's network, since layers may be dearer than those they replace. Their product is
"explained"; a method that takes more than 1.15 times that is flagged as dear.

    python benchmarks/methods.py [--repeats 7] [--steps 5] [--batch 50] [--threads 2] [--only greg scaffold]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.round import (
    base_phases,
    begin,
    broadcast,
    draws,
    finish,
    initial_state,
    server_update,
    step,
    train,
    train_twin,
)
from fednorms.core.states import Client, Task
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import EngineSettings
from fednorms.engines.loop import Loop
from fednorms.methods.registry import method as read
from fednorms.methods.registry import names
from fednorms.models import build
from fednorms.runs.store.clients import ClientStore

TOLERANCE = 1.15  # what a method's own arithmetic over the parameters may cost on top of its passes
FITTING = {"fedrep": "fedrep(head_epochs=1)"}  # a step is a step, of whichever phase


def synthetic(clients: int, images: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k in range(clients):
        x = torch.randint(0, 256, (images, 3, 32, 32), generator=generator, dtype=torch.uint8)
        y = torch.randint(0, 10, (images,), generator=generator)
        sites.append(Site(f"c{k}", "synthetic", train=Split(x, y), attributes={"modality": f"m{k}"}))
    return Federation("synthetic", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


class Steps:
    """A client in its second round (where all terms are active), ready to take local steps."""

    def __init__(self, method: Method, federation: Federation, batch: int, threads: int) -> None:
        model = build("lenet", classes=10, channels=3, size=32, seed=0)
        training = federation
        for p in method.parts:
            training = p.arrange(training)
        clients = [s.name for s in training.clients]
        self.task = Task(
            net=Net(model, method, name="lenet"),
            training=Training(batch_size=batch, lr=0.01),
            rounds=4,
            seed=0,
            clients=len(clients),
            samples=sum(len(s.splits["train"]) for s in training.clients),
            preprocessing=federation.preprocessing,
        )
        engine = Loop(self.task, training, federation, ClientStore(2**30), EngineSettings(threads))
        state = engine.setup(initial_state(self.task))
        state = server_update(self.task, state, engine.train(broadcast(self.task, state), clients).uploads)
        site = training.clients[0]
        self.sent = broadcast(self.task, state)
        self.client = Client(site.name, site.splits["train"], engine.store.get(site.name), dict(site.attributes))

    def seconds(self) -> float:
        """Seconds per step of this client's round, without what comes before and after its steps."""
        carry, early = begin(self.task, self.sent, self.client)
        spent, taken = 0.0, 0
        for batches, phase in draws(self.task, carry, base_phases(self.task, carry.context)):
            started = time.perf_counter()
            step(self.task, carry, batches, phase)
            spent += time.perf_counter() - started
            taken += 1
        if self.task.twin:
            started = time.perf_counter()
            train_twin(self.task, carry, self.task.twin)
            spent += time.perf_counter() - started
        finish(self.task, carry, early)
        return spent / taken

    def passes(self) -> tuple[float, float]:
        """Forward passes per step, with and without a gradient."""
        seen: list[bool] = []
        hook = self.task.net.module.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        carry, _ = begin(self.task, self.sent, self.client)
        seen.clear()
        train(self.task, carry, base_phases(self.task, carry.context))
        if self.task.twin:
            train_twin(self.task, carry, self.task.twin)
        hook.remove()
        return sum(seen) / carry.steps, (len(seen) - sum(seen)) / carry.steps

    def one_pass(self) -> float:
        """Seconds of one forward and backward pass of the network only."""
        net = self.task.net
        x, y = self.client.data.batch(torch.arange(self.task.training.batch_size))
        x = self.task.preprocessing(x)
        leaves = {n: net.initial[n].clone().requires_grad_() for n in net.trained}
        tensors = {**net.initial.clone(), **leaves}
        started = time.perf_counter()
        logits, _ = net.forward(tensors, x, train=True, batch_statistics=True)
        torch.autograd.grad(nn.functional.cross_entropy(logits, y), list(leaves.values()), allow_unused=True)
        return time.perf_counter() - started


def turns(ours: Callable[[], float], plain: Callable[[], float], repeats: int) -> float:
    """The median ratio of measurements next to each other in time: a busy machine slows both."""
    ours(), plain()
    return statistics.median(ours() / plain() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="local steps in a turn")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="only these methods")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    federation = synthetic(2, args.steps * args.batch)
    plain = Steps(Method(), federation, args.batch, args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} threads, LeNet, batch {args.batch}, median of {args.repeats} turns"
    )
    print(f"{'method':<14}{'x FedAvg':>10}{'passes':>10}{'network':>9}{'explained':>11}")
    report: dict[str, dict[str, float | bool]] = {}
    for name in args.only or names():
        try:
            ours = Steps(read(FITTING.get(name, name)), federation, args.batch, args.threads)
        except BadInput as error:
            print(f"{name:<14}  {error}")
            continue
        ratio = turns(ours.seconds, plain.seconds, args.repeats)
        network = turns(ours.one_pass, plain.one_pass, 3 * args.repeats) if ours.task.net.changes else 1.0
        full, light = ours.passes()
        most = (full + light / 3) * max(network, 1.0)
        dear = ratio > TOLERANCE * most
        report[name] = {"ratio": ratio, "passes": full, "light": light, "network": network, "dear": dear}
        count = f"{full:g}" + (f" + {light:g}" if light else "")
        print(f"{name:<14}{ratio:>10.2f}{count:>10}{network:>9.2f}{most:>11.2f}{'   dear' if dear else ''}", flush=True)
    print("dear:", ", ".join(n for n, row in report.items() if row["dear"]) or "none")
    print(json.dumps({"torch": torch.__version__, "machine": platform.machine(), "threads": args.threads, **report}))


if __name__ == "__main__":
    main()
