"""Bytes and CPU-seconds a round: our apps against Flower's own FedAvg with a ClientApp as in Flower's tutorials.

The same network, images, batches and learning rate, in the same SuperLink and SuperNodes on the loopback interface, in
turns. Waiting is excluded: CPU time of all their processes is counted, not the clock. Start-up is excluded too: a round
is the difference between a long and a short run, divided by their difference in rounds. Bytes are those between the
link and the nodes, counted by a proxy.

Flower starts a process for every message, and the first use of torch.optim in a process imports all of torch._dynamo.
Our optimizer does not need it, which says nothing about Flower. FedAvg therefore runs a second time with SGD written by
hand. All three must end with the same model, bit for bit.

PYTHONPATH=. python benchmarks/flower_fedavg.py [--repeats 3] [--long 6] [--width 1] [--sites 2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import tempfile
import threading
from pathlib import Path

import numpy as np

from fednorms.core.batches import batch_plan
from fednorms.core.noise import seed_of
from fednorms.core.part import Phase
from fednorms.core.training import Training
from tests.support.flower_processes import Cluster, free_port

TRAINING = Training(batch_size=32, lr=0.05)
IMAGES, TESTED = 512, 128
SEED = 0

# -- what both projects share -----------------------------------------------------------------------------------------
TASK = '''"""Network and data: the small CNN of Flower's PyTorch tutorial on images of 32x32."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = @WIDTH@


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6 * WIDTH, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6 * WIDTH, 16 * WIDTH, 5)
        self.fc1 = nn.Linear(16 * WIDTH * 5 * 5, 120 * WIDTH)
        self.fc2 = nn.Linear(120 * WIDTH, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def seeded_net():
    torch.manual_seed(0)
    return Net()


def load(path):
    return np.load(path)
'''

OURS = '''"""Our apps, with a loader of the project's own."""

import torch
from task import load, seeded_net

from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.flower import client_app, server_app


def my_site(context, recipe):
    found, name = load(context.node_config["data"]), str(context.node_config["site"])
    x, y = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
    test = Split(torch.from_numpy(found["test_x"]), torch.from_numpy(found["test_y"]))
    return Federation("sites", [Site(name, name, train=Split(x, y), test=test)], list("0123456789"), Preprocessing())


client = client_app(site=my_site, model=seeded_net)
server = server_app(model=seeded_net)
'''

THEIRS = '''"""Flower's FedAvg, as in Flower's tutorials."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Net, load, seeded_net
from torch import nn

client = ClientApp()
server = ServerApp()


@client.train()
def train(msg: Message, context: Context):
    torch.set_num_threads(1)
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    found = load(context.node_config["data"])
    x, y = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
    optimizer = torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])
    criterion = nn.CrossEntropyLoss()
    net.train()
    running = 0.0
    batches = found[f"plan_{msg.content['config']['server-round'] - 1}"]
    for rows in torch.from_numpy(batches):
        optimizer.zero_grad()
        loss = criterion(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        running += loss.item()
    metrics = MetricRecord({"train_loss": running / len(batches), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@client.evaluate()
def evaluate(msg: Message, context: Context):
    torch.set_num_threads(1)
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    found = load(context.node_config["data"])
    x, y = torch.from_numpy(found["test_x"]), torch.from_numpy(found["test_y"])
    net.eval()
    with torch.no_grad():
        logits = net(x)
    metrics = {
        "eval_loss": float(nn.functional.cross_entropy(logits, y)),
        "eval_acc": float((logits.argmax(1) == y).float().mean()),
        "num-examples": len(x),
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    from flwr.app import ConfigRecord

    config, sites = context.run_config, int(context.run_config["sites"])
    strategy = FedAvg(min_train_nodes=sites, min_evaluate_nodes=sites, min_available_nodes=sites)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(seeded_net().state_dict()),
        train_config=ConfigRecord({"lr": config["lr"]}),
        num_rounds=int(config["rounds"]),
    )
    torch.save(result.arrays.to_torch_state_dict(), str(config["out"]))
'''


def write_project(folder: Path, app: str, config: dict[str, object], width: int) -> Path:
    folder.mkdir()
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "job-{folder.name}"
version = "1.0.0"
description = "one job"
dependencies = []

[tool.flwr.app]
publisher = "fednorms"
fab-include = ["app.py", "task.py"]

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
{lines}
"""
    )
    (folder / "app.py").write_text(app)
    (folder / "task.py").write_text(TASK.replace("@WIDTH@", str(width)))
    return folder


def write_data(path: Path, site: str, number: int, rounds: int) -> None:
    """Random images, the labels of which can be learnt, and the rows of every batch of every round."""
    rng = np.random.default_rng(number)
    arrays = {}
    for prefix, n in (("", IMAGES), ("test_", TESTED)):
        y = rng.integers(10, size=n)
        arrays[prefix + "x"] = (rng.random((n, 3, 32, 32)) * 0.5 + y[:, None, None, None] / 20).astype(np.float32)
        arrays[prefix + "y"] = y.astype(np.int64)
    for t in range(rounds):
        plan, _ = batch_plan(IMAGES, TRAINING, Phase(), seed_of("data", SEED, t, site, 0))
        arrays[f"plan_{t}"] = np.stack([rows.numpy() for rows in plan])
    np.savez(path, **arrays)


BY_HAND = (
    THEIRS.replace("        optimizer.zero_grad()\n", "        net.zero_grad()\n")
    .replace('    optimizer = torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])\n', "")
    .replace(
        "        optimizer.step()\n",
        "        with torch.no_grad():\n"
        "            for p in net.parameters():\n"
        '                p.add_(p.grad, alpha=-msg.content["config"]["lr"])\n',
    )
)
APPS = {"ours": OURS, "FedAvg": THEIRS, "FedAvg, SGD by hand": BY_HAND}


# -- counting ---------------------------------------------------------------------------------------------------------
class Proxy:
    """Passes bytes between nodes and the link, and counts them."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0
        self.listener = socket.create_server(("127.0.0.1", free_port()))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            node, _ = self.listener.accept()
            link = socket.create_connection(("127.0.0.1", self.target))
            for source, sink, name in ((node, link, "up"), (link, node, "down")):
                threading.Thread(target=self._pass, args=(source, sink, name), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def cpu_seconds(roots: set[int]) -> float:
    """CPU time of these processes and all that they started, with what ended children left to their parents."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(f) for f in fields[11:15])

    def ours(pid: int) -> bool:
        return pid in roots or (pid in parents and ours(parents[pid]))

    return sum(n for pid, n in ticks.items() if ours(pid)) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A link and its nodes, on which jobs run one after the other."""

    def __init__(self, cluster: Cluster, sites: list[str], width: int, most_rounds: int) -> None:
        self.cluster, self.sites, self.width, self.number = cluster, sites, width, 0
        cluster.link()
        self.proxy = Proxy(cluster.port)
        port, cluster.port = cluster.port, self.proxy.port
        for number, site in enumerate(sites):
            path = cluster.folder / f"{site}.npz"
            write_data(path, site, number, most_rounds)
            cluster.node(site, data=str(path))
        cluster.port = port
        self.roots = {process.pid for process in cluster.started}

    def job(self, who: str, rounds: int) -> tuple[float, int, int, Path]:
        """Run one job: CPU-seconds, bytes up and down, and where its model is."""
        self.number += 1
        out = self.cluster.folder / f"out-{self.number}"
        if who == "ours":
            config: dict[str, object] = {
                "method": "fedavg", "federation": "custom:sites", "model": "custom:Net", "rounds": rounds,
                "seed": SEED, "training.batch_size": TRAINING.batch_size, "training.lr": TRAINING.lr,
                "deploy.sites": ",".join(self.sites), "deploy.out": str(out), "deploy.minimum": len(self.sites),
            }  # fmt: skip
        else:
            config = {"rounds": rounds, "lr": TRAINING.lr, "sites": len(self.sites), "out": str(out)}
        project = write_project(self.cluster.folder / f"job-{self.number}", APPS[who], config, self.width)
        cpu, up, down = cpu_seconds(self.roots), self.proxy.up, self.proxy.down
        run = re.search(r"started run (\d+)", self.cluster.flwr("run", str(project))).group(1)  # type: ignore[union-attr]
        log = self.cluster.folder / "link.log"
        over = re.compile(rf"Finished task \d+ of run {run}")
        self.cluster.wait(lambda: over.search(log.read_text(errors="replace")), 900, f"{who} does not end")
        assert out.exists(), self.cluster.said(run) + self.cluster.logs()
        return cpu_seconds(self.roots) - cpu, self.proxy.up - up, self.proxy.down - down, out


def trained(who: str, out: Path) -> dict[str, np.ndarray]:
    import torch

    if who != "ours":
        return {k: t.numpy() for k, t in torch.load(out, weights_only=True).items()}
    from fednorms.runs.store.checkpoint import load

    found = load(out / "checkpoints")
    assert found is not None
    return {k: t.numpy() for k, t in found.server.model.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--short", type=int, default=1)
    options.add_argument("--long", type=int, default=6)
    options.add_argument("--width", type=int, default=1, help="times the tutorial's 62,006 parameters, roughly squared")
    options.add_argument("--sites", type=int, default=2)
    given = options.parse_args()
    sites = [f"site{i}" for i in range(given.sites)]
    found: dict[str, list[list[float]]] = {who: [] for who in APPS}
    models = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        bench = Bench(cluster, sites, given.width, given.long)
        for repeat in range(given.repeats):
            for who in list(APPS)[:: 1 if repeat % 2 == 0 else -1]:
                short, long = bench.job(who, given.short), bench.job(who, given.long)
                each = [(b - a) / (given.long - given.short) for a, b in zip(short[:3], long[:3], strict=True)]
                found[who].append(each)
                models[who] = trained(who, long[3])
                print(f"{who:<22}{each[0]:>8.2f} CPU-s{each[1]:>12,.0f} up{each[2]:>12,.0f} down, a round", flush=True)
    for who in ("FedAvg, SGD by hand", "FedAvg"):
        far = max(float(np.abs(v - models["ours"][k]).max()) for k, v in models[who].items())
        print(f"largest difference between our final model and that of {who}: {far:.1e}")
        # Means of other than two sites round otherwise, and a last bit may turn a ReLU on.
        assert far == 0 or given.sites != 2, "the two jobs did not train the same model"
    print(f"\n{'a round, ' + str(given.sites) + ' sites':<22}" + "".join(f"{name:>24}" for name in APPS))
    for row, name in enumerate(("CPU-seconds", "bytes up", "bytes down")):
        middle = {who: statistics.median(each[row] for each in found[who]) for who in APPS}
        form = ",.2f" if row == 0 else ",.0f"
        ratios = {who: f"{v:{form}} (ours: x{middle['ours'] / v:.2f})" for who, v in middle.items()}
        print(
            f"{name:<22}"
            + "".join(f"{ratios[who] if who != 'ours' else f'{v:{form}}':>24}" for who, v in middle.items())
        )


if __name__ == "__main__":
    main()
