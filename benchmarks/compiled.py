"""Clients that share a step, as they are and compiled, on the jobs of peers.py: time, memory, agreement, kernels.

Every grouping runs in a process of its own. With `--limit` the process may take so many GB of the card. `--warm` only
compiles, all jobs at the same time: the compiler keeps its results on disk, so the measured runs that follow need not
compile again.

    python -m benchmarks.compiled [--jobs bcadef] [--rounds 8] [--limit 8] [--warm] [--profile bc] [--out figures.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import torch

from benchmarks.peers import JOBS, federation_of, task_of
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.sampling import Participation
from fednorms.engines.base import EngineSettings
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.runs.store.clients import ClientStore

ARMS = {  # together, streams, compiled
    "slots": (1, 8, False),
    "slots, compiled": (1, 8, True),
    "stack": (64, 1, False),
    "stack, compiled": (64, 1, True),
    "2 stacks, compiled": (32, 2, True),
}
STACKED = ("stack", "stack, compiled", "2 stacks, compiled")
SINGLE = ("slots", "slots, compiled")
BY_JOB = {"a": (*SINGLE, "stack, compiled"), "b": STACKED, "c": STACKED, "d": SINGLE, "e": SINGLE, "f": STACKED}


@dataclass
class Figures:
    """What one way to run a job's clients took, and how far its model is from the loop's after one round."""

    job: str
    arm: str
    ms: float
    first_s: float
    compiled_s: float
    peak_gb: float
    reserved_gb: float
    distance: float
    notes: list[str]


def play(job, arm: str, rounds: int, profile: bool, warm: bool) -> Figures:
    """Run a job with one grouping of its clients."""
    together, streams, compiled = ARMS[arm]
    job = replace(job, test=0)
    federation, task = federation_of(job), task_of(job, "float32")
    together = min(together, -(-job.cohort // streams)) if together > 1 else 1
    how = {"streams": streams, "together": together, "compiled": compiled}
    engine = Graphs(task, federation, federation, ClientStore(2**34), EngineSettings(), **how)
    sampler = Participation("fixed", job.cohort)
    state = initial_state(task)

    def one_round(engine, state):
        cohort = sampler.cohort(engine.clients, 0, state.round)
        state = server_update(task, state, engine.train(broadcast(task, state), cohort).uploads)
        torch.cuda.synchronize()
        return state

    started = time.perf_counter()
    after = one_round(engine, state)
    first = time.perf_counter() - started
    if warm:
        return Figures(job.key, arm, 0.0, first, engine.steps.compiled_for, 0.0, 0.0, 0.0, engine.notes)
    loop = one_round(Loop(task, federation, federation, ClientStore(2**34), EngineSettings()), state)
    flat = [torch.cat([t.double().flatten() for t in s.model.values()]) for s in (state, after, loop)]
    distance = float((flat[1] - flat[2]).norm() / (flat[0] - flat[2]).norm())
    torch.cuda.reset_peak_memory_stats()
    times, state = [], after
    for number in range(rounds + 2):
        started = time.perf_counter()
        state = one_round(engine, state)
        if number > 1:
            times.append(time.perf_counter() - started)
    if profile:
        kernels(lambda: one_round(engine, state), f"{job.key}, {arm}")
    peak, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.memory_reserved() / 1e9
    spent = engine.steps.compiled_for
    return Figures(job.key, arm, 1e3 * statistics.median(times), first, spent, peak, reserved, distance, engine.notes)


def kernels(job, title: str) -> None:
    """Print where a round's time goes on the card."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    started = time.perf_counter()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        job()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(f"\nprofile of {title}: {total / 1e3:.1f} ms on the card in {1e3 * (time.perf_counter() - started):.0f} ms")
    for e in rows[:22]:
        print(f"  {e.self_device_time_total / 1e3:8.2f} ms {e.count:6} x  {e.key[:100]}")


def child(job: str, arm: str, args: argparse.Namespace) -> subprocess.Popen:
    """Start a process for one grouping of a job."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--child", f"{job}:{arm}", "--rounds", str(args.rounds)]
    command += ["--limit", str(args.limit), "--profile", args.profile] + ["--warm"] * args.warm
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="bcafde")
    parser.add_argument("--arms", default="", help="separated by semicolons: any of " + "; ".join(ARMS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--limit", type=float, default=0.0, help="GB that a process may take (0: all)")
    parser.add_argument("--profile", default="", help="jobs that are profiled; kernels of several streams overlap")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--out", default="")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    jobs = {job.key: job for job in JOBS}
    if args.child:
        key, arm = args.child.split(":")
        if args.limit:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit * 1e9 / total))
        with numerics("float32", deterministic=False):
            found = play(jobs[key], arm, args.rounds, key in args.profile, args.warm)
        print("FIGURES " + json.dumps(vars(found)))
        return
    wanted = [
        (key, arm)
        for key in args.jobs
        for arm in (args.arms.split(";") if args.arms else BY_JOB[key])
        if not args.warm or "compiled" in arm
    ]
    rows, running = [], []
    for key, arm in wanted:
        process = child(key, arm, args)
        if args.warm:
            running.append((key, arm, process))
        else:
            rows.append(told(key, arm, process))
    rows += [told(*some) for some in running]
    if args.out:
        with open(args.out, "w") as file:
            json.dump([row for row in rows if row], file, indent=1)


def told(key: str, arm: str, process: subprocess.Popen) -> dict[str, object] | None:
    """Print the figures of a process, or the end of what it said."""
    said, _ = process.communicate()
    lines = said.splitlines()
    found = next((json.loads(line.removeprefix("FIGURES ")) for line in lines if line.startswith("FIGURES ")), None)
    if found is None:
        print(f"({key}) {arm}: failed\n  " + "\n  ".join(lines[-12:]), flush=True)
        return None
    for line in lines:
        if "profile of" in line or line.startswith("  "):
            print(line)
    print(
        f"({key}) {arm:<18}{found['ms']:7.1f} ms, first {found['first_s']:.1f} s, compiling {found['compiled_s']:.1f} s"
        f"  peak {found['peak_gb']:5.2f} GB, reserved {found['reserved_gb']:5.2f}  off {found['distance']:.1e}"
        f"  {' '.join(found['notes'])[:160]}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
