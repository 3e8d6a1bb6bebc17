"""A prediction, not a measurement: rounds of the jobs of peers.py on several GPUs of one machine.

Measured are the milliseconds of a round on one card (the options), and the bytes that the engine of several devices
exchanges: a client is trained for one round here, and what it uploads is counted as engines/many_devices.py sends it.
Assumed are the speeds of the links and a fixed cost of a round. The model:

    round = fixed + broadcast + one card's time * largest share / cohort + all-reduce + return of the sums

Broadcast and return pass the host's memory; the all-reduce is a ring in float64, 2 (g - 1) / g of its bytes.

    python benchmarks/several_gpus.py [--ms a=25.0 c=28.7 e=276] [--link-gbs 300] [--host-gbs 20] [--fixed-ms 2]
"""

from __future__ import annotations

import argparse
import math

import torch
from peers import JOBS, Job, model_of

from fednorms.core.net import Net
from fednorms.core.round import broadcast, initial_state
from fednorms.core.states import Task, Upload
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.loop import Loop
from fednorms.methods.registry import method
from fednorms.runs.store.clients import ClientStore

CARDS = (1, 2, 4, 8)


def one_upload(job: Job, text: str) -> Upload:
    """What a client sends after a round of one batch of two images."""
    x = torch.zeros(2, 3, job.size, job.size, dtype=torch.uint8)
    site = Site("a", "a", Split(x, torch.tensor([0, 1])))
    federation = Federation("one", [site], [str(c) for c in range(10)], Preprocessing.centered(3))
    net = Net(model_of(job), method(text), name=job.model)
    task = Task(net, Training(batch_size=2, lr=0.0), 1, 0, 1, 2, federation.preprocessing)
    engine = Loop(task, federation, federation, ClientStore(2**34))
    return engine.train(broadcast(task, engine.setup(initial_state(task))), ["a"]).uploads[0]


def numbers(tree: Tree) -> int:
    return sum(t.numel() for t in tree.values() if t.is_floating_point())


def predicted(job: Job, ms: float, sent: int, cards: int, link: float, host: float, fixed: float) -> float:
    """Milliseconds of a round; `sent` floating-point numbers come from each client, links are in bytes per ms."""
    if cards == 1:
        return ms
    share = math.ceil(job.cohort / cards) / job.cohort
    ring = 2 * (cards - 1) / cards * 8 * sent / link
    return fixed + 4 * sent / host + ms * share + ring + 8 * sent / host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", nargs="*", default=["a=25.0", "c=28.7", "e=276"])
    parser.add_argument("--link-gbs", type=float, default=300.0)
    parser.add_argument("--host-gbs", type=float, default=20.0)
    parser.add_argument("--fixed-ms", type=float, default=2.0)
    given = parser.parse_args()
    link, host = given.link_gbs * 1e6, given.host_gbs * 1e6
    print(f"PREDICTED: links {given.link_gbs:g} GB/s, host {given.host_gbs:g} GB/s, {given.fixed_ms:g} ms per round")
    print("| job | all-reduce | " + " | ".join(f"{g} card{'s' * (g > 1)}" for g in CARDS) + " |")
    print("|---" * (2 + len(CARDS)) + "|")
    for text in given.ms:
        key, _, ms = text.partition("=")
        job = next(j for j in JOBS if j.key == key)
        upload = one_upload(job, job.method)
        sent = numbers(upload.model) + sum(map(numbers, upload.parts.values()))
        times = [predicted(job, float(ms), sent, g, link, host, given.fixed_ms) for g in CARDS]
        said = [f"{t:.1f} ms ({times[0] / t:.1f}x)" for t in times]
        print(f"| ({key}), cohort {job.cohort} | {8 * sent / 1e6:.1f} MB | {' | '.join(said)} |")


if __name__ == "__main__":
    main()
