"""Kill -9 of run, resume, compare, reproduce, export, pack and advise: nothing is lost or half written.

At random file operations, and runs also at random times.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import fednorms as fn
from fednorms.data.packed import check_pack
from tests.campaign.scene import Budget, Outcome, command, content, options, scene

RUN = ("--method", "scaffold + fedbn", "--rounds", "3", "--momentum", "0.5", "--quiet")
TABLE = """
paper = "fednorms"
label = "Tiny"
title = "Two methods on two rounds"
tolerance = 3.0
seeds = 1

[recipe]
rounds = 2
model = "cnn-small"
training = { batch_size = 64 }

[[settings]]
name = "shift"
recipe.data = { size = 8, val = 0.1, test = 0.8 }
[settings.columns]
Avg = "mean"

[[rows]]
name = "FedAvg"
method = "fedavg"
published.shift = { Avg = 1.0 }

[[rows]]
name = "FedBN"
method = "fedbn"
published.shift = { Avg = 1.0 }
"""


def campaign(seconds: float, seed: int) -> Outcome:
    found, draw = Outcome("kills"), random.Random(seed)
    with scene() as root:
        before = time.monotonic()
        whole = command(root, "run", *options(root, *RUN), "--out", root / "whole")
        lasted = time.monotonic() - before
        assert whole.code == 0, whole.said
        expected = content(root / "whole")
        scenarios: list[Callable[[Path, random.Random, int], str]] = [
            lambda root, draw, n: killed_run(root, draw, expected, stop_at=draw.randrange(1, whole.operations + 1)),
            lambda root, draw, n: killed_run(root, draw, expected, after=lasted * draw.uniform(0.01, 1.2)),
            _export,
            _pack,
            _compare,
            _reproduce,
            _advise,
            # A new command that writes files gets its scenario here: kill it at file operation `n`, say what is wrong.
        ]
        for number in Budget(seconds):
            stop, scenario = draw.randrange(1, 41), scenarios[number % len(scenarios)]
            found.tries += 1
            if problem := scenario(root, draw, stop):
                found.bad.append(f"scenario {number % len(scenarios)}, stop {stop}: {problem}")
    return found


def killed_run(
    root: Path, draw: random.Random, expected: dict[str, bytes], stop_at: int = 0, after: float = 0.0
) -> str:
    """Kill a run at a file operation or after seconds, perhaps also its continuation; then let it end."""
    out = root / "killed"
    shutil.rmtree(out, ignore_errors=True)
    start = ("run", *options(root, *RUN), "--out", out)
    first = command(root, *start, stop_at=stop_at, after=after)
    if draw.random() < 0.5 and (out / "recipe.toml").exists():
        command(root, "resume", out, "--quiet", stop_at=draw.randrange(1, 40))
    last = command(root, *(("resume", out, "--quiet") if (out / "recipe.toml").exists() else start))
    if last.code:
        return f"{first.code}, then {last.said}"
    if content(out) != expected:
        return "other bits"
    return "".join(f"{f.path}: {f.why}" for f in fn.verify(out).damaged)


def _export(root: Path, draw: random.Random, stop: int) -> str:
    out = root / "model"
    shutil.rmtree(out, ignore_errors=True)
    command(root, "export", root / "whole", "--out", out, "--site", "north", stop_at=stop % 12 + 1)
    problem = "half an export" if out.exists() and fn.verify(out).damaged else ""
    for left in root.glob(".model.*"):
        shutil.rmtree(left)
    return problem


def _pack(root: Path, draw: random.Random, stop: int) -> str:
    out = root / "data.fnpack"
    before = out.read_bytes() if out.exists() else None
    command(root, "data", "pack", root / "images", out, stop_at=stop % 6 + 1)
    if out.exists():
        check_pack(out)
    elif before is not None:
        return "the old pack is gone"
    for left in root.glob("*.partial"):
        left.unlink()
    return ""


def _compare(root: Path, draw: random.Random, stop: int) -> str:
    out = root / "compared"
    shutil.rmtree(out, ignore_errors=True)
    start = ("compare", "--methods", "fedavg", "fedbn", "--seeds", "1", *options(root, "--rounds", "1"), "--quiet")
    command(root, *start, "--out", out, stop_at=stop)
    last = command(root, *start, "--out", out)
    if last.code:
        return last.said
    runs = [p.parent for p in out.rglob("recipe.toml")]
    whole = root / "compared-whole"
    if not whole.exists():
        command(root, *start, "--out", whole)
    same = all(content(run) == content(whole / run.relative_to(out)) for run in runs)
    told = json.loads((out / "comparison.json").read_bytes())["methods"]
    return "" if same and len(runs) == 2 and len(told) == 2 else "other bits"


def _reproduce(root: Path, draw: random.Random, stop: int) -> str:
    if not (root / "table").exists():
        (root / "table").mkdir()
        (root / "table" / "table.toml").write_text(TABLE)
    start = ("reproduce", root / "table", "--quiet", "--out")
    whole, out = root / "reproduced-whole", root / "reproduced"
    if not whole.exists():
        done = command(root, *start, whole)
        assert done.code in (0, 1), done.said  # 1: a cell is not what the table says
    shutil.rmtree(out, ignore_errors=True)
    command(root, *start, out, stop_at=stop)
    last = command(root, *start, out)
    if last.crashed or last.code not in (0, 1):
        return last.said
    return "" if _cells(out) == _cells(whole) else "other results"


def _advise(root: Path, draw: random.Random, stop: int) -> str:
    start = ("advise", root / "images", "--size", "8", "--rounds", "2", "--val", "0.5", "--budget", "20")
    start = (*start, "--methods", "fedavg", "fedbn", "--rates", "0.03", "0.1", "--quiet", "--out")
    whole, out = root / "advised-whole", root / "advised"
    if not whole.exists():
        done = command(root, *start, whole)
        assert done.code == 0, done.said
    shutil.rmtree(out, ignore_errors=True)
    command(root, *start, out, stop_at=stop)
    last = command(root, *start, out)
    if last.code:
        return last.said
    told = [json.loads((folder / "advice.json").read_bytes()) for folder in (out, whole)]
    same = all(told[0][key] == told[1][key] for key in ("measures", "excluded", "finalists", "curves"))
    return "" if same else "another advice"


def _cells(out: Path) -> list[object]:
    """What must be equal in tables that were reproduced: the results of every run, without times."""
    runs = json.loads((out / "results.json").read_bytes())["runs"]
    return [[run[key] for key in ("setting", "row", "seed", "status", "rounds", "last")] for run in runs]
