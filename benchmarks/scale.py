"""How the cost of a round grows: with the clients of the federation, with the cohort, and with the model.

Each point is a process: seconds of CPU time and of the clock until the first round (`opening` the data is not part of
it), the median round after the first, and the peak memory. A curve is a power of its variable: the exponent is the
slope of a line through the last points on logarithmic axes. Work grows with exponent 0 with the clients, and with 1
with the cohort and the parameters; nothing should grow faster.

    clients     10 to 10,000 ordinary clients, and 1,000 to 1,000,000 that are made on demand; cohort 10
    million     1,000,000 clients made on demand, cohort 100: FedAvg, SCAFFOLD and FedBN
    cohort      1 to 500 clients of a round
    parameters  10^4 to 10^8 parameters of the network; cohort 2, one step each

    python benchmarks/scale.py [--only clients million cohort parameters] [--out scale.json] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fednorms as fn
from fednorms.data import Preprocessing


class Wide(nn.Module):
    """A network of about as many parameters as asked for, in one hidden layer; its work is theirs."""

    def __init__(self, parameters: int, inputs: int = 192):
        super().__init__()
        width = max(round(parameters / (inputs + 11)), 1)
        self.flat, self.hidden = nn.Flatten(), nn.Linear(inputs, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.flat(x))))


def ordinary(clients: int, images: int = 20) -> fn.Federation:
    """Clients in a list, each with a part of the same images; the first ten are tested."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (images, 3, 16, 16), generator=generator, dtype=torch.uint8)
    split = fn.Split(x, torch.randint(0, 10, (images,), generator=generator))
    sites = [fn.Site(f"c{k:05d}", "one", split, test=split if k < 10 else None) for k in range(clients)]
    return fn.Federation("ordinary", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


def tiny(clients: int, images: int = 4) -> fn.Federation:
    """Two clients with a few images of 8 pixels, for large networks."""
    x = torch.zeros(images, 3, 8, 8, dtype=torch.uint8)
    sites = [fn.Site(f"c{k}", "one", fn.Split(x, torch.arange(images))) for k in range(clients)]
    return fn.Federation("tiny", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


def point(kind: str, n: int, method: str, stored: bool) -> dict[str, float]:
    """Run one point in this process."""
    torch.set_num_threads(1)
    rounds, cohort, model, batch = 4, 10, "cnn-small", 10
    started = time.process_time()
    if kind == "ordinary":
        federation = ordinary(n)
    elif kind == "parameters":
        federation, cohort, model, batch = tiny(2), 2, Wide(n), 4
    else:
        clients, cohort = (1000, n) if kind == "cohort" else (n, 100 if kind == "million" else 10)
        federation = fn.federation(f"digits-crowd(clients={clients}, tested=10)")
    opened, clock = time.process_time(), time.perf_counter()
    begun: list[float] = []
    cpu: list[float] = [0.0]

    def after(event: fn.RoundEvent) -> None:
        cpu.append(time.process_time())
        begun.append(time.perf_counter() - event.row["seconds"])

    recipe = fn.Recipe(
        training={"lr": 0.05, "batch_size": batch},
        participation=f"fixed:{min(cohort, n) if kind != 'parameters' else 2}",
        evaluate_every=rounds,
        engine="loop",
        device="cpu",
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run" if stored else None
        result = fn.run(method, federation, model, rounds, recipe=recipe, out=out, callback=after, progress=False)
    return {
        "opening": opened - started,
        "start": begun[0] - clock,
        "round": statistics.median(row["seconds"] for row in result.history[1:-1]),
        "round_cpu": statistics.median(b - a for a, b in itertools.pairwise(cpu[1:-1])),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


CURVES: dict[str, list[tuple[str, list[int], str, bool]]] = {  # kind of point, values, method, stored in a folder
    "clients": [
        ("ordinary", [10, 100, 1000, 10_000], "fedavg", True),
        ("on demand", [1000, 10_000, 100_000, 1_000_000], "fedavg", True),
    ],
    "million": [("million", [1_000_000], method, True) for method in ("fedavg", "scaffold", "fedbn")],
    "cohort": [("cohort", [1, 10, 100, 500], method, True) for method in ("fedavg", "scaffold")],
    "parameters": [("parameters", [10**4, 10**5, 10**6, 10**7, 10**8], "fedavg", False)],
}
MOST = {"clients": 0.1, "million": 0.1, "cohort": 1.1, "parameters": 1.1}  # the exponent of the work, and some noise


def exponent(values: list[int], costs: list[float]) -> float:
    """The slope through the last two points on logarithmic axes: before, constant costs hide it."""
    return math.log(costs[-1] / costs[-2]) / math.log(values[-1] / values[-2])


def measured(kind: str, n: int, method: str, stored: bool) -> dict[str, float]:
    """One point in a process of its own."""
    command = [sys.executable, __file__, "--point", json.dumps([kind, n, method, stored])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} {n} {method}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def picture(report: list[dict[str, object]], path: Path) -> None:
    """Seconds of a round and memory against what grows, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in CURVES if any(r["curve"] == name and len(r["values"]) > 1 for r in report)]
    size = 4 * len(names), 6
    figure, axes = pyplot.subplots(2, len(names), figsize=size, squeeze=False, sharey="row", layout="constrained")
    for column, name in enumerate(names):
        for row, (cost, words) in enumerate((("round_cpu", "CPU seconds per round"), ("peak_mb", "peak memory, MB"))):
            axis = axes[row, column]
            for r in report:
                if r["curve"] == name:
                    label = f"{r['kind']}, {r['method']}" if name == "clients" else str(r["method"])
                    axis.loglog(r["values"], [p[cost] for p in r["points"]], marker="o", label=label)
            axis.set(xlabel="clients per round" if name == "cohort" else name, ylabel="" if column else words)
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(point(*json.loads(given.point))))
        return
    print(f"torch {torch.__version__}, {platform.machine()}; one thread; exponents are between the last two points")
    report: list[dict[str, object]] = []
    for name in given.only:
        for kind, values, method, stored in CURVES[name]:
            points = []
            for n in values:
                points.append(measured(kind, n, method, stored))
                said = "  ".join(f"{k} {v:.0f}" if k == "peak_mb" else f"{k} {v:.3f} s" for k, v in points[-1].items())
                print(f"{kind:>10} {n:>11,} {method:9} {said}", flush=True)
            row: dict[str, object] = {"curve": name, "kind": kind, "method": method, "values": values, "points": points}
            if len(values) > 1:
                row["exponents"] = {c: exponent(values, [p[c] for p in points]) for c in ("round_cpu", "peak_mb")}
                time_, memory = row["exponents"].values()
                more = "" if time_ <= MOST[name] else f"  more than {MOST[name]}"
                print(f"{kind:>10} {method}: exponents: CPU time {time_:.2f}, memory {memory:.2f}{more}", flush=True)
            report.append(row)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))
    if given.plot:
        picture(report, given.plot)


if __name__ == "__main__":
    main()
