"""Run the command line as a user does: in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.waiting import HANG, wait_until

SRC = Path(__file__).parents[2] / "src"
ENV = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error", "COLUMNS": "120"}
FEDNORMS = (sys.executable, "-m", "fednorms")
HELD = (sys.executable, str(Path(__file__).with_name("held.py")))


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def fednorms(*args, cwd=None) -> Said:
    done = subprocess.run([*FEDNORMS, *map(str, args)], capture_output=True, text=True, env=ENV, cwd=cwd, timeout=HANG)
    assert "\x1b" not in done.stdout + done.stderr, "control characters without a terminal"
    return Said(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(*args, program=FEDNORMS) -> Iterator[subprocess.Popen]:
    """A running command; its process is ended, whatever happens to the test."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = signal.getsignal(signal.SIGINT)  # a suite in the background ignores it, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*program, *map(str, args)], text=True, env=ENV, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def held(*args, run: Path, number: int) -> Iterator[subprocess.Popen]:
    """A command that has written this round's row of the run and then waits for a signal."""
    metrics = run / "metrics.jsonl"
    with started(run, number, *args, program=HELD) as process:
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") == number, process)
        yield process


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Two sites with two classes of six 8-pixel images each, bright or dark; small enough for a quick round."""
    root = tmp_path_factory.mktemp("images")
    numbers = np.random.default_rng(0)
    for k, site in enumerate(("north", "south")):
        for label in ("cat", "dog"):
            (root / site / label).mkdir(parents=True)
            for i in range(6):
                pixels = numbers.integers(0, 100, (8, 8, 3)) + 100 * (label == "dog") + 50 * k
                Image.fromarray(pixels.astype(np.uint8)).save(root / site / label / f"{i}.png")
    return root
