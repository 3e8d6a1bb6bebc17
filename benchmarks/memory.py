"""Memory of the graph engine against the size of the cohort and the clients' states.

For each number of clients in a round: peak GPU memory and milliseconds per round, for FedAvg, which leaves one model
per client until the round is over, and SCAFFOLD, which leaves three (model, variate up, variate kept). Then the same
job with a low limit on waiting results and on client states in memory: these go to the host and to disk. Memory
must not grow, and the result must be the same.

    python benchmarks/memory.py [--device cuda] [--clients 8,64,256] [--rounds 3] [--room-mb 1024] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fednorms.core.net import Net
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.runs.store.clients import ClientStore

IMAGES, SIZE, MODEL = 64, 28, "digits-cnn"  # 14 million parameters: 57 MB of float32 per client


def synthetic(clients: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (IMAGES, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (IMAGES,), generator=generator)
    sites = [Site(f"c{k:04d}", "none", train=Split(x, y)) for k in range(clients)]
    return Federation("synthetic", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


def play(
    text: str, clients: int, device: str, rounds: int, room: int | None, limit: int
) -> tuple[dict[str, float], Tree]:
    federation = synthetic(clients)
    net = Net(build(MODEL, classes=10, channels=3, size=SIZE, seed=0), method(text), name=MODEL, device=device)
    task = Task(net, Training(batch_size=32, lr=0.01), rounds, 0, clients, clients * IMAGES, federation.preprocessing)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, numerics("float32", deterministic=True):
        engine = Graphs(task, federation, federation, ClientStore(limit, Path(folder)), streams=8)
        engine.room = engine.room if room is None else room
        state, seconds = engine.setup(initial_state(task)), []
        for _ in range(rounds):
            started = time.perf_counter()
            state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
            float(next(iter(state.model.values())).sum())  # wait
            seconds.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
        row = {
            "clients": clients,
            "peak_gb": peak / 1e9,
            "states_in_memory_gb": engine.store.in_memory() / 1e9,
            "ms_per_round": 1e3 * statistics.median(seconds[1:]),
        }
    return row, state.model.to("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", default="8,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--room-mb", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor()
    rows = []
    for text in ("fedavg", "scaffold"):
        for clients in map(int, given.clients.split(",")):
            models = []
            for name, room, limit in (("free", None, 2**40), ("bounded", given.room_mb << 20, given.room_mb << 20)):
                row, model = play(text, clients, given.device, given.rounds, room, limit)
                models.append(model)
                rows.append({"method": text, "memory": name, **row})
                print(
                    f"{text:9} {clients:5} clients, {name:8}: peak {row['peak_gb']:6.2f} GB, states in memory "
                    f"{row['states_in_memory_gb']:5.2f} GB, {row['ms_per_round']:8.1f} ms per round",
                    flush=True,
                )
            same = all(torch.equal(a, models[1][k]) for k, a in models[0].items())
            print(f"{text:9} {clients:5} clients: the same model bit for bit: {same}", flush=True)
    if given.out:
        given.out.write_text(json.dumps({"hardware": where, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
