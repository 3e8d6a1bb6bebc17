"""`python held.py RUN ROUND ARGUMENT...` is `fednorms ARGUMENT...`, but holds when it has written that round's row.

A test that interrupts or kills the command then meets it there, however late the test gets the processor. The row is
written and its checkpoint is not, which is the hardest moment to continue from.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednorms.cli import main
from fednorms.runs.store.directory import RunDirectory

append = RunDirectory.append_metrics


def hold(run: Path, number: int) -> None:
    def append_and_hold(self: RunDirectory, row: Mapping[str, Any]) -> None:
        append(self, row)
        while (self.path, row["round"]) == (run, number):
            signal.pause()  # an interrupt raises here

    RunDirectory.append_metrics = append_and_hold


if __name__ == "__main__":
    hold(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
