"""The lifeline of a link: a locked file, by which the processes that it started notice its end, however it ends.

Flower's own apps look for their parent by its number and then interrupt themselves once. That fails if the number is
still taken, or if the app is busy, and the app would then hold the run's lock for good. A lock of the system is free as
soon as the process that held it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from pathlib import Path

from fednorms.core.errors import BadInput

try:
    import fcntl
except ImportError:  # Windows: no link there
    fcntl = None  # type: ignore[assignment]

VARIABLE = "FEDNORMS_LINK"  # the path of the lifeline, in the environment of what a link starts
KILLED = 137  # exit code of a process that ended with its link


class Lifeline:
    """The lifeline of this process. `mark` is a part of the commands that it starts, and of no other command."""

    def __init__(self, path: Path, handle: int, mark: str) -> None:
        self.path, self._handle, self._mark = path, handle, mark
        self._children: list[int] = []

    def environment(self) -> dict[str, str]:
        """What `end_with_link` needs in the environment of a process that the link starts."""
        return {VARIABLE: str(self.path)}

    def note(self, child: subprocess.Popen[bytes]) -> None:
        """Remember a child for the next start."""
        self._children.append(child.pid)
        os.pwrite(self._handle, json.dumps({"mark": self._mark, "children": self._children}).encode(), 0)


@contextmanager
def lifeline(path: Path, mark: str) -> Iterator[Lifeline]:
    """Hold a lifeline; what a killed link left running is ended first."""
    path = path.resolve()
    _take_over(path)
    new = path.with_name(path.name + ".new")
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.replace(new, path)  # a new file: whoever waits for the old one waits for the old link
        yield Lifeline(path, handle, mark)
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def end_with_link() -> None:
    """End this process when the link ends that started it; do nothing where no link did."""
    path = os.environ.get(VARIABLE)
    if path is None or fcntl is None:
        return

    def wait() -> None:
        with suppress(OSError):  # the file is gone: so is the link
            handle = os.open(path, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_SH)  # waits
        os._exit(KILLED)

    threading.Thread(target=wait, daemon=True).start()


def end_with_parent() -> None:
    """End this process, a worker of `multiprocessing`, when the process that started it ends."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(KILLED)

    threading.Thread(target=wait, daemon=True).start()


def _take_over(path: Path) -> None:
    """Refuse to start next to a link that runs, and end what a killed one left."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        told = json.loads(os.read(handle, 2**16) or b"{}")
    except BlockingIOError:
        raise BadInput(f"Another link uses {path.with_suffix('')}. Stop it, or choose another --database.") from None
    except ValueError:  # it was killed while it wrote the file
        told = {}
    finally:
        os.close(handle)
    if isinstance(told, dict) and isinstance(told.get("children"), list):
        _end_stale(str(told.get("mark", "")), told["children"])


def _end_stale(mark: str, children: Sequence[object]) -> None:
    for number in children:
        if isinstance(number, int) and number > 1 and mark and mark in _command(number):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)


def _command(number: int) -> str:
    """The command line of a process, empty if there is none; a number can be taken by another process by now."""
    found = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(number)], capture_output=True, check=False)
    return found.stdout.decode(errors="replace")
