"""Many short runs in one process: no descriptor, process, shared memory or temporary file stays, and memory is flat."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import fednorms as fn
from tests.campaign.scene import Budget, Outcome, in_child, scene

RUNS = 500
MORE_MB = 64  # growth of the memory that counts as a leak
WARM = 3  # runs before the first look


def campaign(seconds: float, seed: int) -> Outcome:
    found = Outcome("leaks")
    with scene() as root:
        report = root / "report"

        def work() -> int:
            tries, bad, first = 0, list[str](), None
            for number in Budget(seconds, most=RUNS):
                engine = "workers" if number % 50 == 1 else "loop"
                fn.run("fedbn", root / "images", rounds=1, engine=engine, out=root / "run", batch_size=4)
                fn.export(root / "run", root / "model", averaged=True)
                for made in (root / "run", root / "model"):
                    shutil.rmtree(made)
                tries, now = number + 1, _held()
                if number == WARM:
                    first = now
                elif first is not None and (problem := _grown(first, now)):
                    bad.append(f"after {tries} runs: {problem}")
                    break
            report.write_text("\n".join([str(tries), *bad]))
            return 0

        ended = in_child(work, root)
        lines = report.read_text().splitlines() if report.exists() else ["0", ended.said]
        found.tries, found.bad = int(lines[0]), lines[1:]
    return found


def _children() -> int:
    """Processes whose parent is this one."""
    parents = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents.append(int(file.read_text().rpartition(")")[2].split()[1]))
    return parents.count(os.getpid())


def _held() -> tuple[int, int, int, int, float]:
    gc.collect()
    named = [
        p for folder in ("/dev/shm", tempfile.gettempdir()) for p in Path(folder).glob(f"fednorms-{os.getpid()}-*")
    ]
    kept = len(list(Path(tempfile.gettempdir()).glob("fednorms-clients-*")))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), _children(), len(named), kept, resident


def _grown(first: tuple[int, int, int, int, float], now: tuple[int, int, int, int, float]) -> str:
    names = ("descriptors", "processes", "files of shared memory", "temporary folders")
    more = [f"{b - a} more {name}" for name, a, b in zip(names, first, now, strict=False) if b > a + (name == names[0])]
    if now[-1] > first[-1] + MORE_MB:
        more.append(f"{now[-1] - first[-1]:.0f} MB more")
    return ", ".join(more)
