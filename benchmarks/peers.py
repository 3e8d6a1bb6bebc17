"""Our engines against a plain PyTorch loop and pfl-research on seven jobs, in one run on one GPU.

Arms: the graph engine with cuDNN free to choose, the same repeating bit for bit, our loop, a hand-written loop, and
pfl-research if it can be imported (nothing is installed). All arms share one precision setting (float32, TF32 off by
default) and have their data on the device. Times are medians of rounds after two to warm up; the graph engine first
runs the rounds in which it chooses how to group clients. `--memory` limits the process to so many GB and measures only
the graph engine: does the job fit a smaller card?

    python benchmarks/peers.py [--jobs abcdefg] [--rounds 10] [--precision float32] [--memory 8] [--out figures.json]
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fednorms.core.net import Net
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.sampling import Participation
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import EngineSettings
from fednorms.engines.devices import dtype_of, numerics
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import headline
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.runs.store.clients import ClientStore


class PflCNN(nn.Module):
    """The small network of pfl-research's CIFAR-10 reference job."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(12544, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.body(x))


class MLP(nn.Module):
    """The perceptron of FedAvg's MNIST experiments, for color images."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())
        self.head = nn.Linear(200, 10)

    def forward(self, x):
        return self.head(self.body(x))


@dataclass(frozen=True)
class Job:
    key: str
    words: str
    model: str
    method: str
    clients: int
    images: int
    size: int
    batch: int
    cohort: int
    test: int = 0  # test images, evaluated every 10 rounds


JOBS = [
    Job("a", "10 clients x 500, LeNet+GN, batch 50", "lenet", "gn(groups=2)", 10, 500, 32, 50, 10),
    Job("b", "50 clients x 100, LeNet+GN, batch 4", "lenet", "gn(groups=2)", 50, 100, 32, 4, 50),
    Job(
        "c", "pfl's CIFAR job: 1,000 users x 50, cohort 50, batch 10", "pfl-cnn", "fedavg", 1000, 50, 32, 10, 50, 10000
    ),
    Job("d", "5 clients x 743, six-layer digits CNN with BN, batch 32", "digits-cnn", "fedavg", 5, 743, 28, 32, 5),
    Job(
        "e",
        "4 clients x 584 of 96 px, ResNet-18 with BN, batch 16",
        "torchvision:resnet18",
        "fedavg",
        4,
        584,
        96,
        16,
        4,
    ),
    Job("f", "100 clients x 20, MLP of 200 units, batch 2", "mlp", "fedavg", 100, 20, 28, 2, 100),
    Job("g", "4 clients x 62 of 256 px, AlexNet, batch 32", "alexnet", "fedavg", 4, 62, 256, 32, 4),
]
TRIALS = 18  # rounds: each grouping is recorded in one and timed in the next


GROUPINGS: dict[str, str] = {}  # of the last round: groups side by side, clients that take their steps together


def model_of(job: Job) -> nn.Module:
    if job.model == "pfl-cnn":
        torch.manual_seed(0)
        return PflCNN()
    if job.model == "mlp":
        torch.manual_seed(0)
        return MLP()
    return build(job.model, classes=10, channels=3, size=job.size, seed=0)


def federation_of(job: Job) -> Federation:
    generator = torch.Generator().manual_seed(0)

    def split(n):
        x = torch.randint(0, 256, (n, 3, job.size, job.size), generator=generator, dtype=torch.uint8)
        return Split(x, torch.randint(0, 10, (n,), generator=generator))

    sites = [Site(f"c{k:04d}", "synthetic", train=split(job.images)) for k in range(job.clients)]
    if job.test:
        sites[0] = Site("c0000", "synthetic", train=sites[0].train, test=split(job.test))
    return Federation("synthetic", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


LONG = 10**6  # rounds of a run for which it pays to compile
SHORT = 200


def task_of(job: Job, precision: str, rounds: int = LONG) -> Task:
    net = Net(model_of(job), method(job.method), name=job.model, device="cuda", dtype=dtype_of(precision))
    return Task(
        net=net,
        training=Training(batch_size=job.batch, lr=0.01),
        rounds=rounds,
        seed=0,
        clients=job.clients,
        samples=job.clients * job.images,
        preprocessing=Preprocessing.centered(3),
        cohort=job.cohort,
    )


def ours(job: Job, federation: Federation, kind: type[Loop] | type[Graphs], precision: str, rounds: int = LONG):
    task = task_of(job, precision, rounds)
    engine = kind(task, federation, federation, ClientStore(2**34), EngineSettings(threads=8))
    state = initial_state(task)
    sampler = Participation("fixed", job.cohort)
    mode = headline(task)

    def one_round(number):
        nonlocal state
        cohort = sampler.cohort(engine.clients, 0, state.round)
        state = server_update(task, state, engine.train(broadcast(task, state), cohort).uploads)
        if job.test and number % 10 == 9:
            engine.evaluate(state, mode, cohort)
        torch.cuda.synchronize()
        if isinstance(engine, Graphs):
            GROUPINGS[job.key] = (
                f"{engine.grouping.streams} x {engine.grouping.together}{' compiled' * engine.grouping.compiled}"
            )

    return one_round


def plain(job: Job, federation: Federation):
    """What one writes by hand: one model, torch's optimizer, a mean of state dicts; everything on the device."""
    net = Net(model_of(job), method(job.method), name=job.model, device="cuda")
    model = net.plain(net.initial).train()
    data = [(federation.preprocessing(s.train.x.cuda()), s.train.y.cuda()) for s in federation.clients]
    test = [(federation.preprocessing(s.test.x.cuda()), s.test.y.cuda()) for s in federation.clients if s.test]
    weights = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(0)

    def one_round(number):
        nonlocal weights
        total = None
        for k in torch.randperm(len(data), generator=generator)[: job.cohort].tolist():
            x, y = data[k]
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for rows in torch.randperm(len(y), device="cuda").split(job.batch):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            state = model.state_dict()
            if total is None:
                total = {n: v / job.cohort if v.is_floating_point() else v.clone() for n, v in state.items()}
            else:
                for n, v in state.items():
                    if v.is_floating_point():
                        total[n] += v / job.cohort
        weights = total
        if test and number % 10 == 9:
            model.load_state_dict(weights)
            model.eval()
            with torch.no_grad():
                sum(
                    (model(x[i : i + 1000]).argmax(1) == y[i : i + 1000]).sum()
                    for x, y in test
                    for i in range(0, len(y), 1000)
                ).item()
            model.train()
        torch.cuda.synchronize()

    return one_round


def pfl_research(job: Job, federation: Federation, rounds: int) -> list[float]:
    """Seconds of each round of pfl's own FedAvg; it has no say over single rounds, so a callback keeps the time."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    net = Net(model_of(job), method(job.method), name=job.model, device="cuda")
    module = net.plain(net.initial).train()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner(x)

        def loss(self, x, y, eval=False):
            self.eval() if eval else self.train()
            return nn.functional.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x, y, eval=True):
            self.eval()
            right = (self(x).argmax(1) == y).sum().item()
            return {"accuracy": Weighted(right, len(y))}

    model = Wrapped()
    data = {s.name: (federation.preprocessing(s.train.x.cuda()), s.train.y.cuda()) for s in federation.clients}
    users = FederatedDataset(
        lambda name: Dataset(raw_data=list(data[name]), user_id=name),
        get_user_sampler("minimize_reuse", list(data)),
    )
    times: list[float] = []

    class Clock(TrainingProcessCallback):
        def __init__(self):
            self.started = time.perf_counter()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            torch.cuda.synchronize()
            now = time.perf_counter()
            times.append(now - self.started)
            self.started = now
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=job.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=PyTorchModel(
            model=model,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.01, local_batch_size=job.batch),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return times[:1] + times[2:]


def timed(one_round, rounds: int, warm_up: int = 1) -> list[float]:
    """Seconds of the first round, and of rounds after some to warm up."""
    started = time.perf_counter()
    one_round(0)
    first = time.perf_counter() - started
    for _ in range(warm_up):
        one_round(1)
    times = [first]
    for number in range(rounds):
        started = time.perf_counter()
        one_round(number)
        times.append(time.perf_counter() - started)
    return times


def ceilings() -> tuple[float, float]:
    """What this card does: float operations of a large product, bytes of a large copy, per second."""
    a = torch.randn(8192, 8192, device="cuda")
    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)

    def rate(job, amount):
        job()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            job()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return amount / statistics.median(times)

    return rate(lambda: a @ a, 2 * 8192**3), rate(lambda: other.copy_(big), 2 * 2**30)


def floor_of(job: Job, flops: float, bandwidth: float) -> dict[str, float]:
    """Milliseconds that one round's operations and least memory traffic would need at the ceilings.

    Traffic of a step: weights read twice, gradients written and read, weights read and written (6 copies of the model),
    and every layer's output written once and read twice.
    """
    net = Net(model_of(job), method(job.method), name=job.model, device="cuda")
    model = net.plain(net.initial).train()
    outputs = [0]
    hooks = [
        m.register_forward_hook(lambda _, __, out: outputs.__setitem__(0, outputs[0] + out.numel() * 4))
        for m in model.modules()
        if not list(m.children())
    ]
    x = torch.randn(job.batch, 3, job.size, job.size, device="cuda")
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(model(x), torch.zeros(job.batch, dtype=torch.long, device="cuda")).backward()
    for hook in hooks:
        hook.remove()
    steps = job.cohort * -(-job.images // job.batch)
    weights = sum(p.numel() * 4 for p in model.parameters())
    return {
        "arithmetic_ms": 1000 * steps * counter.get_total_flops() / flops,
        "memory_ms": 1000 * steps * (6 * weights + 3 * outputs[0]) / bandwidth,
    }


def measure(
    job: Job, rounds: int, precision: str, has_pfl: bool, flops: float, bandwidth: float, memory: float
) -> dict[str, object]:
    """Time every arm on one job and print the table."""
    federation = federation_of(job)
    few = max(rounds // 3, 2)
    arms = {
        "graphs": lambda: timed(ours(job, federation, Graphs, precision), rounds, TRIALS),
        "graphs, repeatable": lambda: timed(ours(job, federation, Graphs, precision), rounds, TRIALS),
        "loop": lambda: timed(ours(job, federation, Loop, precision), few),
        "plain": lambda: timed(plain(job, federation), few),
    }
    if memory:
        arms = {name: arm for name, arm in arms.items() if "graphs" in name}
    elif has_pfl:
        arms["pfl-research"] = lambda: pfl_research(job, federation, few + 2)
    rows: dict[str, dict[str, Any]] = {}
    for name, arm in arms.items():
        gc.collect()  # the engine of the last arm
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with numerics(precision, deterministic="repeatable" in name):
            first, *times = arm()
        seconds = statistics.median(times)
        rows[name] = {
            "ms": 1000 * seconds,
            "first_s": first,
            "images_per_s": job.cohort * job.images / seconds,
            "peak_mb": torch.cuda.max_memory_allocated() / 2**20,
            "reserved_mb": torch.cuda.max_memory_reserved() / 2**20,
            "grouping": GROUPINGS.pop(job.key, ""),
        }
    floor = floor_of(job, flops, bandwidth)
    print(f"\n({job.key}) {job.words}")
    print(f"  floor: {floor['arithmetic_ms']:.1f} ms arithmetic, {floor['memory_ms']:.1f} ms memory")
    for name, row in rows.items():
        ratio = row["ms"] / rows["graphs"]["ms"]
        print(
            f"  {name:<20}{row['ms']:>10.1f} ms  {row['images_per_s']:>10.0f} images/s  {row['peak_mb']:>7.0f} MB  "
            f"{row['reserved_mb']:>7.0f} reserved  "
            f"first {row['first_s']:.1f} s  "
            f"{ratio:.1f} x graphs  {row['grouping']}"
        )
    return {"job": job.words, "arms": rows, "floor": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="abcdefg")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--memory", type=float, default=0.0, help="GB that the process may take (0: all)")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.memory:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory * 1e9 / total))
    has_pfl = importlib.util.find_spec("pfl") is not None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.precision}; pfl-research: {has_pfl}")
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with numerics(args.precision, deterministic=False):
        flops, bandwidth = ceilings()
    print(f"ceilings: {flops / 1e12:.1f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s")
    for job in (j for j in JOBS if j.key in args.jobs):
        figures[job.key] = measure(job, args.rounds, args.precision, has_pfl, flops, bandwidth, args.memory)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
