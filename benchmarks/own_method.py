"""Search for a method of our own: many combinations, short runs first, chosen on validation images only.

    python benchmarks/own_method.py run --data FOLDER --state FOLDER --processes 8 --minutes 9
    python benchmarks/own_method.py results --state FOLDER

The data folder holds the packs that `own_data.py` writes. What runs next follows from all finished runs in the state
folder (`own_plan.py`), so a search can be interrupted, and continue on another machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import own_parts  # noqa: F401  (registers the candidates)
import torch
from own_plan import PLANS, Progress, Trial

import fednorms as fn

REAL = ("mnist", "svhn", "usps", "mnist-m")  # SynthDigits is a stand-in
PACKS = {"digits": "digits-search.fnpack", "natural": "natural-search.fnpack"}
LAST = 3  # validations at the end whose mean is a run's score


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


def search(plan: str, data: Path, folder: Path, number: int, minutes: float) -> None:
    """Run what is wanted and no other process has claimed, until the time is over."""
    begun, longest = time.perf_counter(), 0.0
    loaded: dict[str, fn.Federation] = {}
    while True:
        scores = scores_of(known(folder))
        wanted = Progress(PLANS[plan], scores).wanted()
        trial = next((t for t in wanted if t.key not in scores and claimed(folder, t)), None)
        if time.perf_counter() - begun + longest > 60 * minutes or (trial is None and not running(folder, scores)):
            return
        if trial is None:  # what comes next depends on what other processes run now
            time.sleep(1)
            continue
        if trial.data not in loaded:
            loaded[trial.data] = federation(trial.data, data)
        row = play(trial, loaded[trial.data])
        longest = max(longest, row["seconds"] * PLANS[plan].final_rounds / trial.rounds)
        with (folder / f"{time.time_ns()}-{number}.jsonl").open("w") as file:
            file.write(json.dumps(row) + "\n")


def claim(folder: Path, key: str) -> Path:
    """The file that says that a process runs a trial."""
    return folder / "claims" / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()


def claimed(folder: Path, trial: Trial) -> bool:
    """Claim a trial; False if another process has done so."""
    try:
        claim(folder, trial.key).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def running(folder: Path, scores: Mapping[str, float]) -> bool:
    """Whether some process runs a trial now."""
    return not set((folder / "claims").iterdir()) <= {claim(folder, key) for key in scores}


def processes(number: int, arguments: Sequence[str], folder: Path) -> None:
    """Search with several processes; claims of an earlier call, which may have been killed, are void."""
    shutil.rmtree(folder / "claims", ignore_errors=True)
    (folder / "claims").mkdir(parents=True)
    children = [subprocess.Popen([sys.executable, __file__, *arguments, "--number", str(i)]) for i in range(number)]
    for child in children:
        child.wait()
    runs = known(folder)
    for file in folder.glob("*.jsonl"):
        file.unlink()
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def scores_of(runs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What finished runs are chosen by; one that failed has 0."""
    return {Trial(**run["trial"]).key: score(run) or 0.0 for run in runs}


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
    parser.add_argument("--plan", default="full", help="a plan of own_plan.py")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the packs")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)  # of one of these processes
    parser.add_argument("--minutes", type=float, default=1e9, help="start no trial that would end later")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "results":
        runs = known(given.state)
        print("\n".join(table(runs)))
        print(f"{len(runs)} runs, {sum(r['seconds'] for r in runs) / 60:.1f} minutes of processes")
    elif given.number is None:
        processes(given.processes, sys.argv[1:], given.state)
    else:
        search(given.plan, given.data, given.state, given.number, given.minutes)
