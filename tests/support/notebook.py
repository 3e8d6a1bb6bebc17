"""A notebook kernel without a browser: runs cells, and returns what they display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell


class ZMQInteractiveShell(InteractiveShell):
    """By this name rich knows the shell of a notebook."""

    def init_history(self) -> None:
        """Write no history to the home directory."""
        self.history_manager = None

    def atexit_operations(self) -> None:
        """Nothing was written that must be stored."""


class Kernel:
    """Executes cells one after the other."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def run(self, cell: str) -> list[dict[str, Any]]:
        """Run a cell: all outputs that it displayed or replaced, the newest last."""
        seen = CapturingDisplayPublisher(parent=self.shell)
        before, self.shell.display_pub = self.shell.display_pub, seen
        try:
            done = self.shell.run_cell(cell)
        finally:
            self.shell.display_pub = before
        done.raise_error()
        return seen.outputs


@contextmanager
def kernel(folder: object) -> Iterator[Kernel]:
    """A kernel whose files are in a folder."""
    shell = ZMQInteractiveShell.instance(ipython_dir=str(folder))
    try:
        yield Kernel(shell)
    finally:
        ZMQInteractiveShell.clear_instance()
        shell.restore_sys_module_state()
