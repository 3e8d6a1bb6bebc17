"""Tests wait for events, never for the clock: how busy a machine is must not decide whether a test passes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

# Seconds after which whatever a test waits for counts as hung: no test needs nearly as long, on any machine. It is
# below pytest's own limit (pyproject.toml), which cannot say what was waited for.
HANG = 1800.0


def wait_until(happened: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait for something that a process does; fail if the process ends first."""
    end = time.monotonic() + HANG
    while not happened():
        ended = process.poll() is not None  # before the second check: it may do its work and end between the two
        assert not ended or happened(), process.communicate()
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.05)
