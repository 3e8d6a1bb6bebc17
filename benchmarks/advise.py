"""How well does `fednorms advise` advise? Run every arm in full on generated federations, and count the points lost.

Every federation (kind of shift x strength x size x model) is trained with every arm at every learning rate. From these
records the tournament is played again, bit for bit, since a run that is continued is the run with more rounds. The
regret of an answer is the test accuracy of the best arm minus that of the answer, in points.

    python benchmarks/advise.py run --state FOLDER       # trains what is missing; can be interrupted at any time
    python benchmarks/advise.py page --state FOLDER      # writes docs/results/advise.json and docs/results/advise.md
    python benchmarks/advise.py priors --state FOLDER    # writes what `advise` knows before it trains
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fednorms as fn
from fednorms.advice.arms import Question, propose
from fednorms.advice.measures import measure
from fednorms.advice.summaries import probe
from fednorms.data.splits import split
from fednorms.runs.identity import Custom

ROUNDS, BATCH, SEEDS = 9, 16, 2


class Narrow(nn.Module):
    """Two convolutions with batch normalization: half as many channels as cnn-small and one block less."""

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.last = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(96, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images."""
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        y: Tensor = self.head(self.last(self.relu(self.norm2(self.conv2(x)))).flatten(1))
        return y


@dataclass(frozen=True)
class Case:
    """A federation to advise on: the data set it is made of (priors leave that out), a name, and the model."""

    data: str
    name: str
    model: str
    make: Callable[[], fn.Federation]

    @property
    def key(self) -> str:
        return f"{self.data}, {self.name}, {self.model}"

    def network(self) -> str | nn.Module:
        if self.model != "narrow":
            return self.model
        torch.manual_seed(0)
        return Narrow()


def thinned(federation: fn.Federation, images: int) -> fn.Federation:
    """The same federation with at most so many training images per site, of every class alike."""
    sites = []
    for site in federation.sites:
        if site.train is not None and len(site.train) > images:
            rows = split(site.train.y, {"kept": images / len(site.train)}, 0, site.name)["kept"]
            site = replace(site, train=site.train.subset(rows))
        sites.append(site)
    return replace(federation, sites=sites)


def handwritten(clients: int, label: float, feature: float, images: int) -> fn.Federation:
    """The dials for label shift and feature shift."""
    spec = f"digits-dials(clients={clients}, label={label}, feature={feature})"
    return thinned(fn.federation(spec, size=8, val=0.2, test=0.5), images)


def divided(name: str, size: int, images: int, skewed: bool) -> fn.Federation:
    """A federation of different looks; skewed: every site becomes two with different labels."""
    made = fn.federation(name, size=size, val=0.2, test=0.4)
    return thinned(fn.partition(made, "dirichlet(beta=0.5, clients=2, within=domain)") if skewed else made, images)


CORRUPTIONS = {
    "noise and blur": ("gaussian_noise", "impulse_noise", "defocus_blur", "elastic_transform"),
    "weather and color": ("snow", "fog", "contrast", "saturate"),
}


def corrupted(kind: str, severity: int, images: int) -> fn.Federation:
    """Sites with one corruption each."""
    made = fn.federation(f"digits-corrupted(severity={severity})", size=8, val=0.1, test=0.25)
    return thinned(made.without(*(s.name for s in made.sites if s.name not in CORRUPTIONS[kind])), images)


def cases() -> list[Case]:
    """All federations, the kinds of shift in turn, so that the first results already cover all of them."""
    kinds: list[list[tuple[str, str, Callable[[], fn.Federation]]]] = [
        [
            (
                "handwritten",
                f"{k} sites, {n} images, label {a:g}, feature {b:g}",
                partial(handwritten, k, a, b, n),
            )
            for k, n in ((3, 90), (6, 50))
            for a in (0.0, 0.5, 0.9)
            for b in (0.0, 0.5, 1.0)
        ],
        [
            ("cameras", f"{n} images{', skewed' * skewed}", partial(divided, "digits-shift", 8, n, skewed))
            for n in (30, 60, 100)
            for skewed in (False, True)
        ],
        [
            ("styles", f"{n} images{', skewed' * skewed}", partial(divided, "digits-styles", 12, n, skewed))
            for n in (40, 80, 120)
            for skewed in (False, True)
        ],
        [
            ("corrupted", f"{kind}, severity {s}, {n} images", partial(corrupted, kind, s, n))
            for kind in CORRUPTIONS
            for s in (2, 5)
            for n in (30, 90)
        ],
        [
            ("handwritten", f"4 sites, 40 images, label {a:g}, feature {b:g}", partial(handwritten, 4, a, b, 40))
            for a in (0.0, 0.7)
            for b in (0.0, 0.7)
        ],
    ]
    spread = []
    for k, kind in enumerate(kinds):
        for i, (data, name, make) in enumerate(kind):
            spread.append((i / len(kind), k, Case(data, name, ("cnn-small", "narrow")[(i + k) % 2], make)))
    return [case for _, _, case in sorted(spread, key=lambda item: item[:2])]


class Record:
    """What is known about one case: its measures and its runs, in one file that is replaced after every run."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.path = folder / f"{case.key.replace(', ', '_').replace(' ', '-')}.json"
        self.values: dict[str, Any] = {"data": case.data, "name": case.name, "model": case.model, "runs": []}
        if self.path.exists():
            self.values = json.loads(self.path.read_text())

    def run(self, arm: str, lr: float, seed: int) -> dict[str, Any] | None:
        """A run that is known."""
        return next((r for r in self.values["runs"] if (r["arm"], r["lr"], r["seed"]) == (arm, lr, seed)), None)

    def save(self) -> None:
        """Replace the file."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.values))
        os.replace(new, self.path)


def recipe() -> fn.Recipe:
    """What all runs share."""
    training = {"batch_size": BATCH, "lr": 0.05}
    return fn.Recipe(rounds=ROUNDS, training=training, device="cpu", engine="loop", threads=1, evaluate=[])


def train(folder: Path, most: int) -> None:
    """Run everything that is missing: all rates with one seed first, then more seeds of each arm's best rate."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(SEEDS):
        for case in cases()[:most]:
            record = Record(folder, case)
            federation: fn.Federation | None = None
            if "measures" not in record.values:
                federation = case.make()
                begun = time.perf_counter()
                network = case.network()
                made = Custom.of(federation, network, None)
                sites = probe(
                    recipe().model_copy(update={"model": model_name(network)}), without_test(federation), made
                )
                found = {m.name: m.value for m in measure(sites)}
                record.values |= {"measures": found, "probe_seconds": time.perf_counter() - begun}
                question = Question(network, 10, federation.shape, len(federation.clients), ROUNDS, BATCH)
                one = Question(
                    network, 10, federation.shape, len(federation.clients), ROUNDS, BATCH, wanted="one-model"
                )
                record.values["arms"] = {a.name: list(a.rates) for a in propose(question, found).arms}
                record.values["one_model"] = [a.name for a in propose(one, found).arms]
                record.save()
            for arm, rates in record.values["arms"].items():
                for lr in rates if seed == 0 else [best_rate(record, arm)]:
                    if lr is None or record.run(arm, lr, seed):
                        continue
                    federation = federation or case.make()
                    record.values["runs"].append(one_run(federation, case, arm, lr, seed))
                    record.save()
            print(f"{time.strftime('%H:%M:%S')} seed {seed}: {case.key}", flush=True)


def model_name(network: str | nn.Module) -> str:
    """How a recipe names a network."""
    from fednorms.runs.identity import own_model

    return network if isinstance(network, str) else own_model(network)


def without_test(federation: fn.Federation) -> fn.Federation:
    """The federation without test images: nothing that advises may see them."""
    return replace(federation, sites=[replace(s, test=None) for s in federation.clients])


def best_rate(record: Record, arm: str) -> float | None:
    """The rate of an arm with the best validation after the last round of seed 0; None if all diverged."""
    runs = [r for r in record.values["runs"] if r["arm"] == arm and r["seed"] == 0 and r["val"]]
    return max(runs, key=lambda r: r["val"][-1])["lr"] if runs else None


def one_run(federation: fn.Federation, case: Case, arm: str, lr: float, seed: int) -> dict[str, Any]:
    """Train an arm in full: validation after every round, test after the last one; nothing if it diverged."""
    begun = time.perf_counter()
    known = {"arm": arm, "lr": lr, "seed": seed}
    try:
        result = fn.run(arm, federation, case.network(), recipe=recipe(), lr=lr, seed=seed, progress=False)
    except fn.Diverged as error:
        return known | {"val": [], "test": None, "error": str(error), "seconds": time.perf_counter() - begun}
    session, state = result._session, result._state
    assert session is not None
    assert state is not None
    tested = session.engine.evaluate(state, session.headline, session.cohort(ROUNDS - 1), "test")
    assert tested is not None
    val = [a for _, a in result.curve(split="val")]
    return known | {"val": val, "test": tested.mean, "seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page", "priors"))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--most", type=int, default=1000, help="only the first so many federations")
    given = parser.parse_args()
    if given.what == "run":
        train(given.state, given.most)
