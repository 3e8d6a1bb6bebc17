"""Kill -9 at random file operations of run, resume, compare, export and pack: nothing is lost or half written."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import fednorms as fn
from fednorms.data.packed import check_pack
from tests.campaign.scene import Budget, Outcome, command, content, options, scene

RUN = ("--method", "scaffold + fedbn", "--rounds", "3", "--momentum", "0.5", "--quiet")


def campaign(seconds: float, seed: int) -> Outcome:
    found, draw = Outcome("kills"), random.Random(seed)
    with scene() as root:
        whole = command(root, "run", *options(root, *RUN), "--out", root / "whole")
        assert whole.code == 0, whole.said
        expected = content(root / "whole")
        scenarios: list[Callable[[Path, random.Random, int], str]] = [
            lambda root, draw, n: _run(root, draw, n, expected),
            _export,
            _pack,
            _compare,
        ]
        every: list[int] = []  # operations of a run at which it was not yet killed
        for number in Budget(seconds):
            which = 0 if number % 2 else number // 2 % len(scenarios)
            every = every or draw.sample(range(1, whole.operations + 1), whole.operations)
            stop = draw.randrange(1, 41) if which else every.pop()
            found.tries += 1
            if problem := scenarios[which](root, draw, stop):
                found.bad.append(f"{which}, killed at operation {stop}: {problem}")
    return found


def _run(root: Path, draw: random.Random, stop: int, expected: dict[str, bytes]) -> str:
    out = root / "killed"
    shutil.rmtree(out, ignore_errors=True)
    start = ("run", *options(root, *RUN), "--out", out)
    first = command(root, *start, stop_at=stop)
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
