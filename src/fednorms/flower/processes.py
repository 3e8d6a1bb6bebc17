"""Start Flower's programs as child processes that end with this one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from fednorms.core.errors import BadInput

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def start(name: str, options: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start one of Flower's programs. It finds Flower's other programs, and sends no usage statistics."""
    program = Path(sys.executable).with_name(name)  # where pip put it
    if not program.exists():
        raise BadInput(f"Cannot find {name} next to {sys.executable}. Install it with: pip install 'fednorms[flower]'")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    path = {"PATH": os.pathsep.join([str(program.parent), *os.get_exec_path()])}
    return subprocess.Popen(
        [str(program), *options],
        env={**os.environ, **quiet, **path, **(environment or {})},
        preexec_fn=partial(_end_with, os.getpid()) if sys.platform == "linux" else None,
    )


def end(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Ask a process to end, and end it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def terminable() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so its child processes are ended, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("Terminated.")

    signal.signal(signal.SIGTERM, interrupt)


def _end_with(parent: int) -> None:
    """Also if this process is killed: a node of Flower's that nobody answers for would block its site.

    Flower's programs may take long to end when they are asked to, so they are not asked. Their databases are safe.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
