"""One round of our loop against a plain hand-written PyTorch loop of the same job, in one process, taking turns.

Jobs: LeNet+GN, 10 clients x 500 images, batch 50; and a small model (under 50,000 parameters), batch 10. The plain loop
gets images that are already normalized floats on the device; ours starts from bytes. Then the peak memory of FedAvg
over 1,000 clients against 10 clients with the same cohort and the same data in total, and of a stateful method whose
client states go to disk.

    python benchmarks/loop_overhead.py [--repeats 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

from fednorms.core.net import Net
from fednorms.core.round import broadcast, initial_state
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import EngineSettings
from fednorms.engines.loop import Loop
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.runs.store.clients import ClientStore


def synthetic(clients: int, images: int, size: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k in range(clients):
        x = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
        sites.append(
            Site(f"c{k:04d}", "synthetic", train=Split(x, torch.randint(0, 10, (images,), generator=generator)))
        )
    return Federation("synthetic", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


def our_round(federation: Federation, name: str, batch: int, threads: int):
    model = build(name, classes=10, channels=3, size=federation.shape[1], seed=0)
    task = Task(
        net=Net(model, method("gn(groups=2)"), name=name),
        training=Training(batch_size=batch, lr=0.1),
        rounds=100,
        seed=0,
        clients=len(federation.clients),
        samples=sum(len(s.train) for s in federation.clients),
        preprocessing=federation.preprocessing,
    )
    engine = Loop(task, federation, federation, ClientStore(2**30), EngineSettings(threads))
    state = initial_state(task)

    def one_round():
        nonlocal state
        state = engine.average(state, engine.train(broadcast(task, state), engine.clients))

    return one_round, task.net.module


def plain_round(federation: Federation, module: nn.Module, batch: int):
    """What one writes by hand: one model, torch's optimizer, a mean of state dicts."""
    model = copy.deepcopy(module)
    for m in model.modules():
        m._forward_pre_hooks.clear()
    model.train()
    data = [(federation.preprocessing(s.train.x), s.train.y) for s in federation.clients]
    weights = copy.deepcopy(model.state_dict())

    def one_round():
        nonlocal weights
        total = None
        for x, y in data:
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for rows in torch.randperm(len(y)).split(batch):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            state = model.state_dict()
            if total is None:
                total = {k: v / len(data) for k, v in state.items()}
            else:
                for k, v in state.items():
                    total[k] += v / len(data)
        weights = total

    return one_round


def time_in_turns(first, second, repeats: int) -> tuple[list[float], list[float]]:
    first(), second()
    times = ([], [])
    for _ in range(repeats):
        for job, record in zip((first, second), times, strict=True):
            started = time.perf_counter()
            job()
            record.append(time.perf_counter() - started)
    return times


MEMORY = """
import resource, sys
sys.path.insert(0, {here!r})
from loop_overhead import synthetic
import fednorms as fn
federation = synthetic({clients}, {images}, 16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
recipe = fn.Recipe(evaluate_every=100, state_limit_mb={limit}, threads=1)
fn.run({method!r}, federation, rounds=3, participation="fixed:10", recipe=recipe)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_memory(clients: int, images: int, method: str, limit: int = 1024) -> tuple[float, float]:
    """Megabytes of the process before and at the peak of a run."""
    here = __file__.rsplit("/", 1)[0]
    code = MEMORY.format(here=here, clients=clients, images=images, method=method, limit=limit)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, peak = map(int, out.split())
    return before / 1024, peak / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = {"torch": torch.__version__, "machine": platform.machine(), "threads": args.threads}
    print(f"torch {torch.__version__}, {args.threads} threads, {args.repeats} turns each, medians")
    for job, name, clients, images, batch, size in [
        ("LeNet+GN, 10 clients x 500 images, batch 50", "lenet", 10, 500, 50, 32),
        ("cnn-small+GN, 10 clients x 200 images, batch 10", "cnn-small", 10, 200, 10, 16),
    ]:
        federation = synthetic(clients, images, size)
        ours, module = our_round(federation, name, batch, args.threads)
        plain = plain_round(federation, module, batch)
        a, b = time_in_turns(ours, plain, args.repeats)
        ratio = statistics.median(a) / statistics.median(b)
        report[job] = {"ours_s": statistics.median(a), "plain_s": statistics.median(b), "ratio": ratio}
        print(f"{job}: ours {statistics.median(a):.3f} s, plain {statistics.median(b):.3f} s, ratio {ratio:.3f}")
    for method_name, limit in (("fedavg", 1024), ("scaffold", 4)):
        few, many = peak_memory(10, 1000, method_name, limit), peak_memory(1000, 10, method_name, limit)
        report[f"memory {method_name}"] = {"10 clients": few, "1000 clients": many, "ratio": many[1] / few[1]}
        print(
            f"{method_name}, cohort 10, 10,000 images: peak {few[1]:.0f} MB with 10 clients, "
            f"{many[1]:.0f} MB with 1,000 "
            f"(ratio {many[1] / few[1]:.2f}; before the run {few[0]:.0f} and {many[0]:.0f} MB)"
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
