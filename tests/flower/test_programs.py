"""Flower's programs as children of ours: they end with it, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fednorms.core.errors import BadInput
from fednorms.flower import processes
from tests.support.waiting import wait_until

PARENT = """
import signal, sys, time
from fednorms.flower import processes
sys.executable = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background, it is ignored
processes.terminable()
child = processes.start("program", [])
print(child.pid, flush=True)
try:
    time.sleep(3600)
finally:
    processes.end(child)
"""


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_program_ends_with_its_parent(ending, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 3600\n")
    program.chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(Path(processes.__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "python")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(ending)
        parent.wait()
    sleeper = subprocess.Popen(["sleep", "3600"])  # wait_until watches a process; this one stays
    try:
        wait_until(lambda: not alive(child), sleeper)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_program_that_is_not_installed_is_named():
    with pytest.raises(BadInput, match=r"Cannot find no-such-program .* pip install 'fednorms\[flower\]'"):
        processes.start("no-such-program", [])
