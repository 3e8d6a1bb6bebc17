"""What the campaigns share: a tiny scene on disk, commands in a forked child, and the outcome that they print."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sklearn.metrics  # noqa: F401  # children are forked: none of them has to import what is imported here
from PIL import Image

import fednorms.reports.run
import fednorms.runs.driver  # noqa: F401
from fednorms.cli import main

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


@dataclass
class Outcome:
    """How often a campaign tried, and what went wrong."""

    name: str
    tries: int = 0
    bad: list[str] = field(default_factory=list)
    whole: int = 0  # tries that are all there can be

    def __str__(self) -> str:
        return f"{self.name:<12}{self.tries:>7} tries{len(self.bad):>5} bad" + (f", of {self.whole}" * bool(self.whole))


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, or the signal that killed it, and what it said."""

    code: int
    said: str
    operations: int = 0

    @property
    def crashed(self) -> bool:
        return "Traceback" in self.said

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Budget:
    """Iterates until the seconds are over, at least once and at most `most` times."""

    def __init__(self, seconds: float, most: float = math.inf) -> None:
        self.end, self.most = time.monotonic() + seconds, most

    def __iter__(self) -> Iterator[int]:
        number = 0
        while number == 0 or (number < self.most and time.monotonic() < self.end):
            yield number
            number += 1


@contextmanager
def scene() -> Iterator[Path]:
    """A folder with images/ of two sites, removed in the end; the image cache is in it, too."""
    root = Path(tempfile.mkdtemp(prefix="fednorms-campaign-"))
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    numbers = np.random.default_rng(0)
    for k, site in enumerate(("north", "south")):
        for label in ("cat", "dog"):
            (root / "images" / site / label).mkdir(parents=True)
            for i in range(6):
                pixels = numbers.integers(0, 100, (8, 8, 3)) + 100 * (label == "dog") + 50 * k
                Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / site / label / f"{i}.png")
    try:
        yield root
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
        shutil.rmtree(root, ignore_errors=True)


def options(root: Path, *more: object) -> list[str]:
    """The options of a run of a fraction of a second."""
    given = ["--federation", root / "images", "--batch-size", "4", "--threads", "1", "--engine", "loop", *more]
    return list(map(str, given))


def in_child(work: Callable[[], int], root: Path, stop_at: int = 0, full: bool = False, after: float = 0.0) -> Ended:
    """Run `work` in a forked child; it is killed `after` seconds, if they are given.

    At its operation number `stop_at` on files below `root` (opening to write, renaming, removing), the child is
    killed; with `full`, that operation and all later ones fail as on a full disk.
    """
    said, count = root / ".said", root / ".count"
    child = os.fork()
    if child == 0:
        done = [0]

        def watch(event: str, args: tuple[object, ...]) -> None:
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if not (writes or event in CHANGES) or not str(args[0]).startswith(str(root)) or args[0] in hidden:
                return
            done[0] += 1
            if stop_at and done[0] >= stop_at:
                if not full:
                    os.kill(os.getpid(), signal.SIGKILL)
                if writes or event == "os.mkdir":
                    raise OSError(errno.ENOSPC, "No space left on device")

        hidden = {str(said), str(count), said, count}
        code, text = 70, io.StringIO()
        with suppress(BaseException), redirect_stdout(text), redirect_stderr(text):
            try:
                sys.addaudithook(watch)
                code = work()
            except BaseException:
                traceback.print_exc()
        said.write_text(text.getvalue())
        count.write_text(str(done[0]))
        os._exit(code)
    if after:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)  # it waits for its parent even if it has ended
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    found = Ended(code, said.read_text() if said.exists() else "", int(count.read_text()) if count.exists() else 0)
    for file in (said, count):
        file.unlink(missing_ok=True)
    return found


def command(root: Path, *args: object, stop_at: int = 0, full: bool = False, after: float = 0.0) -> Ended:
    """Run a fednorms command in a child."""
    return in_child(lambda: main([str(a) for a in args]), root, stop_at, full, after)


def content(run: Path) -> dict[str, bytes]:
    """What must be equal in equal runs: the files that the last manifest names, and the metrics without times."""
    manifest = json.loads(sorted((run / "checkpoints").glob("round-*/manifest.json"))[-1].read_bytes())
    named = [manifest["server"], *manifest["clients"].values()]  # a kill may leave older files until the next save
    files = [run / "checkpoints" / entry["path"] for entry in named]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plain = json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in rows])
    return {str(f.relative_to(run)): f.read_bytes() for f in files} | {"metrics": plain.encode()}


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes as a bad disk, a broken transfer or a crash might leave them."""
    at = draw.randrange(max(len(data), 1))
    kind = draw.choice(["flip", "flip", "cut", "zeros", "grow", "swap", "empty"])
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "zeros":
        return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
    if kind == "grow":
        return data + draw.randbytes(draw.randrange(1, 100))
    if kind == "swap":
        return data[at:] + data[:at]
    return b""
