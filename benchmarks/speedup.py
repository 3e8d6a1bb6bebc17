"""How the graph engine's advantage depends on batch size and clients, and what precision costs and saves; on one GPU.

python -m benchmarks.speedup --out figures.json        # measure, on a machine with a GPU
python -m benchmarks.speedup --draw figures.json a.png # draw the plot, anywhere
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

import fednorms as fn
from benchmarks.peers import SHORT, TRIALS, Job, federation_of, ours, plain, timed
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs

BATCHES = (4, 16, 64)
CLIENTS = (5, 20, 50)


def sweep() -> dict[str, dict[str, float]]:
    """Milliseconds of a round, 128 images per client, LeNet+GN: graphs (cuDNN free) and a plain loop."""
    found = {}
    for batch in BATCHES:
        for clients in CLIENTS:
            job = Job("s", "", "lenet", "gn(groups=2)", clients, 128, 32, batch, clients)
            federation = federation_of(job)
            with numerics("float32", deterministic=False):
                fast = statistics.median(timed(ours(job, federation, Graphs, "float32", SHORT), 8, TRIALS)[1:])
                slow = statistics.median(timed(plain(job, federation), 2)[1:])
            found[f"{batch},{clients}"] = {"graphs": 1000 * fast, "plain": 1000 * slow}
            print(f"batch {batch:>3}, {clients:>3} clients: {1000 * fast:8.1f} ms against {1000 * slow:8.1f} ms plain")
    return found


def precisions() -> dict[str, dict[str, object]]:
    """Accuracy (mean over domains, three seeds) and milliseconds per round of LeNet on digits-shift at 32 pixels."""
    found: dict[str, dict[str, object]] = {}
    for precision, deterministic in (("float32", True), ("float32", False), ("tf32", False), ("bfloat16", False)):
        name = f"{precision}{', repeatable' if deterministic else ''}"
        for method in ("fedavg", "fedbn", "gn(groups=2)", "fednn"):
            accuracies, times = [], []
            for seed in range(3):
                recipe = fn.Recipe(
                    device="cuda",
                    precision=precision,
                    deterministic=deterministic,
                    data={"size": 32},
                    evaluate_every=30,
                )
                result = fn.run(method, model="lenet", rounds=30, lr=0.1, seed=seed, recipe=recipe)
                accuracies.append(result.accuracy)
                times += [row["seconds"] for row in result.history[5:-1]]
            found[f"{name}: {method}"] = {"accuracies": accuracies, "ms": 1000 * statistics.median(times)}
            print(f"{name:<22}{method:<14}{statistics.mean(accuracies):.3f}  {1000 * statistics.median(times):.1f} ms")
    return found


def draw(figures: str, out: str) -> None:
    import matplotlib.pyplot as plt

    with open(figures) as file:
        found = json.load(file)["sweep"]
    fig, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for batch, marker, colour in zip(BATCHES, "osD", ("#0072B2", "#D55E00", "#009E73"), strict=True):
        ratios = [found[f"{batch},{c}"]["plain"] / found[f"{batch},{c}"]["graphs"] for c in CLIENTS]
        axis.plot(CLIENTS, ratios, marker=marker, color=colour, label=f"batch {batch}")
    axis.set(xlabel="clients in a round", ylabel="times faster than a plain loop", ylim=(0, None))
    axis.set_title("Clients as CUDA graphs, LeNet+GN, 128 images each, one H200", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    fig.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("sweep", "precision"))
    parser.add_argument("--out", default="")
    parser.add_argument("--draw", nargs=2, metavar=("FIGURES", "PNG"))
    args = parser.parse_args()
    if args.draw:
        draw(*args.draw)
        return
    parts = {"sweep": sweep, "precision": precisions}
    figures: dict[str, object] = {"device": torch.cuda.get_device_name()}
    figures |= {name: measure() for name, measure in parts.items() if args.only in (None, name)}
    if args.out:
        with open(args.out, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
