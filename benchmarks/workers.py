"""Rounds of the loop against worker processes on this machine's cores, one thread each, taking turns.

Jobs: a small model (cnn-small+GN, batch 10, 20 clients x 100 images of 16 pixels) and a large one (the six-layer digits
CNN with BN, batch 32, 4 clients x 96 images of 28 pixels). For each: seconds per round in the loop and in workers, the
ratio, and whether the models are equal bit for bit; with --auto-rounds also a run with engine="auto" (which starts
in the loop and keeps what is faster) against as many rounds in the loop. Nothing else should run on the machine.

    python benchmarks/workers.py [--workers 2] [--repeats 5] [--auto-rounds 40] [--jobs small,large]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch

from fednorms.core.net import Net
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import Engine, EngineSettings
from fednorms.engines.loop import Loop
from fednorms.engines.workers import Workers
from fednorms.engines.workers.auto import Auto
from fednorms.engines.workers.pool import cores
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.runs.store.clients import ClientStore

JOBS = {  # model, method, batch, clients, images, pixels
    "small": ("cnn-small", "gn(groups=2)", 10, 20, 100, 16),
    "large": ("digits-cnn", "fedavg", 32, 4, 96, 28),
}


def synthetic(clients: int, images: int, size: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k in range(clients):
        x = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
        sites.append(Site(f"c{k:03d}", "none", train=Split(x, torch.randint(0, 10, (images,), generator=generator))))
    return Federation("synthetic", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


def task_of(job: str, rounds: int) -> tuple[Task, Federation]:
    name, text, batch, clients, images, size = JOBS[job]
    federation = synthetic(clients, images, size)
    net = Net(build(name, classes=10, channels=3, size=size, seed=0), method(text), name=name)
    training = Training(batch_size=batch, lr=0.05)
    task = Task(net, training, rounds, 0, clients, clients * images, federation.preprocessing)
    return task, federation


class Runner:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.state = engine, initial_state(engine.task)

    def round(self) -> float:
        started, task = time.perf_counter(), self.engine.task
        done = self.engine.train(broadcast(task, self.state), self.engine.clients)
        self.state = server_update(task, self.state, done.uploads)
        return time.perf_counter() - started


def compare(job: str, workers: int, repeats: int) -> dict[str, object]:
    task, federation = task_of(job, 1000)
    loop = Runner(Loop(task, federation, federation, ClientStore(2**30)))
    many = Runner(Workers(task, federation, federation, ClientStore(2**30), EngineSettings(workers=workers)))
    start, _ = many.round(), loop.round()  # starts the processes; warms up
    pairs = [(loop.round(), many.round()) for _ in range(repeats)]
    many.engine.close()
    equal = all(torch.equal(t, many.state.model[k]) for k, t in loop.state.model.items())
    slow, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "parameters": sum(t.numel() for t in task.net.initial.values()),
        "loop_s": round(slow, 3),
        "workers_s": round(fast, 3),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
        "ratio_of_fastest": round(
            min(a for a, _ in pairs) / min(b for _, b in pairs), 2
        ),  # what else runs disturbs less
        "start_s": round(start - fast, 1),
        "same_bits": equal,
    }


def auto(job: str, workers: int, rounds: int) -> dict[str, object]:
    task, federation = task_of(job, rounds)
    chosen = Auto(task, federation, federation, ClientStore(2**30), EngineSettings(workers=workers))
    totals = []
    for runner in (Runner(Loop(task, federation, federation, ClientStore(2**30))), Runner(chosen)):
        started = time.perf_counter()
        for _ in range(rounds):
            runner.round()
        totals.append(time.perf_counter() - started)
    using = chosen.chosen
    chosen.close()
    return {"rounds": rounds, "loop_s": round(totals[0], 1), "auto_s": round(totals[1], 1), "chose": using,
            "ratio": round(totals[0] / totals[1], 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--auto-rounds", type=int, default=0)
    parser.add_argument("--jobs", default="small,large")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"machine": platform.machine(), "cores": cores(), "torch": torch.__version__}))
    for job in args.jobs.split(","):
        print(json.dumps({"job": job, "workers": args.workers, **compare(job, args.workers, args.repeats)}), flush=True)
        if args.auto_rounds:
            print(json.dumps({"job": job, "engine": "auto", **auto(job, args.workers, args.auto_rounds)}), flush=True)


if __name__ == "__main__":
    main()
