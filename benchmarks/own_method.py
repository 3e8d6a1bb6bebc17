"""Search for a method of our own: many combinations, short runs first, chosen on validation images only.

    python benchmarks/own_method.py run --stage 1 --data FOLDER --state FOLDER --part 1/8 --minutes 9
    python benchmarks/own_method.py results --state FOLDER

The data folder holds the packs that `own_data.py` writes. A run that is known is not repeated, so a search can be
interrupted.
No result of this search is published yet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import own_parts  # noqa: F401  (registers the candidates)
import torch

import fednorms as fn

REAL = ("mnist", "svhn", "usps", "mnist-m")  # SynthDigits is a stand-in
PACKS = {"digits": "digits-search.fnpack", "natural": "natural-search.fnpack"}
LAST = 3  # validations at the end whose mean is a run's score
WON = "fedwon(clip=0.64, start='xavier')"


@dataclass(frozen=True)
class Trial:
    """One combination at one learning rate, on one federation."""

    method: str
    lr: float
    rounds: int = 60
    data: str = "digits"
    seed: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two trials the same."""
        return json.dumps(asdict(self), sort_keys=True)


def trials(stage: str) -> list[Trial]:
    """What a stage of the search runs."""
    from own_stages import STAGES

    return STAGES[stage]()


def known(folder: Path) -> list[dict[str, Any]]:
    """All runs so far."""
    files = sorted(folder.glob("**/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def score(run: Mapping[str, Any]) -> float | None:
    """What a run is chosen by: the mean validation accuracy of the last tests, in percent; no test image counts."""
    curve = [100 * v for v in run["val"][-LAST:]]
    return fmean(curve) if curve and not run.get("error") else None


def play(trial: Trial, federation: fn.Federation) -> dict[str, Any]:
    """Run a trial; what it records of test images is for the page, `score` never reads it."""
    begun = time.perf_counter()
    recipe = fn.Recipe(
        rounds=trial.rounds,
        model="digits-cnn" if trial.data in PACKS else "cnn-small",
        precision="tf32",
        weighting="uniform",
        evaluate=[],
        evaluate_every=max(trial.rounds // 12, 1),
        training={"batch_size": 32, "lr": trial.lr, **trial.training},
        data={"augment": "none"},
    )
    row: dict[str, Any] = {"trial": asdict(trial), "val": [], "test": {}}
    try:
        result = fn.run(trial.method, federation, recipe=recipe, seed=trial.seed, progress=False)
        session, state = result._session, result._state
        assert session is not None
        assert state is not None
        cohort = session.cohort(trial.rounds - 1)
        counted = REAL if trial.data == "digits" else None
        for at in result.history:
            if found := at["scores"].get(f"{session.headline}/val"):
                row["val"].append(mean_of(found["sites"], counted))
        tested = session.engine.evaluate(state, session.headline, cohort, "test")
        assert tested is not None
        row["test"] = {name: s["accuracy"] for name, s in tested.to_dict()["sites"].items()}
        row["headline"] = result.headline
        row["bytes"] = result.history[-1]["bytes_up"]
    except (fn.Diverged, fn.BadInput) as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    except Exception as error:  # one broken candidate must not end the search
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def mean_of(sites: Mapping[str, Mapping[str, float]], counted: Sequence[str] | None) -> float:
    """The mean accuracy of the domains that count."""
    return fmean(s["accuracy"] for name, s in sites.items() if counted is None or name in counted)


def search(stage: str, data: Path, folder: Path, part: int, parts: int, minutes: float) -> None:
    """Run every part-th trial of a stage that is not known yet, until the time is over."""
    begun, longest = time.perf_counter(), 0.0
    folder.mkdir(parents=True, exist_ok=True)
    done = {json.dumps(r["trial"], sort_keys=True) for r in known(folder)}
    loaded: dict[str, fn.Federation] = {}
    with (folder / f"stage{stage}-{part}.jsonl").open("a") as file:
        for trial in trials(stage)[part - 1 :: parts]:
            if trial.key in done:
                continue
            if time.perf_counter() - begun + longest > 60 * minutes:
                break
            if trial.data not in loaded:
                loaded[trial.data] = federation(trial.data, data)
            row = play(trial, loaded[trial.data])
            longest = max(longest, row["seconds"])
            file.write(json.dumps(row) + "\n")
            file.flush()


def federation(name: str, data: Path) -> fn.Federation:
    """The images of a trial."""
    if name in PACKS:
        return fn.federation(f"pack:{data / PACKS[name]}")
    return fn.federation(name, val=0.2, test=0.4)


def table(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per combination and rate, best validation first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(json.dumps({k: v for k, v in run["trial"].items() if k != "seed"}), []).append(run)
    lines = []
    for same in groups.values():
        t, values = same[0]["trial"], [s for r in same if (s := score(r)) is not None]
        counted = [d for d in same[0]["test"] if t["data"] != "digits" or d in REAL]
        tested = [100 * fmean(r["test"][d] for d in counted) for r in same if r["test"]]
        each = " ".join(f"{100 * fmean(r['test'][d] for r in same if r['test']):.1f}" for d in same[0]["test"])
        error = next((r["error"] for r in same if r.get("error")), "")
        spread = f"±{stdev(values):.2f}" if len(values) > 1 else "     "
        lines.append(
            (
                fmean(values) if values else 0.0,
                f"val {fmean(values) if values else 0:6.2f}{spread} test {fmean(tested) if tested else 0:6.2f} "
                f"n={len(same)} {fmean(r['seconds'] for r in same):5.1f}s {same[0].get('headline', ''):12.12s} "
                f"lr={t['lr']:<5g} R={t['rounds']} {t['data']}  {t['method']} {t['training'] or ''} [{each}] "
                f"{error[:90]}",
            )
        )
    return [line for _, line in sorted(lines, reverse=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "results"))
    parser.add_argument("--state", type=Path, required=True, help="folder of the records")
    parser.add_argument("--stage", default="1", help="which stage of the search")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of digits-search.fnpack")
    parser.add_argument("--part", default="1/1", help="which share of the trials, as in 2/4")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no trial that would end later")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "run":
        search(given.stage, given.data, given.state, *map(int, given.part.split("/")), given.minutes)
    else:
        runs = known(given.state)
        print("\n".join(table(runs)))
        print(f"{len(runs)} runs, {sum(r['seconds'] for r in runs) / 60:.1f} minutes of processes")
