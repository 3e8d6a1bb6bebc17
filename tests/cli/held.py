"""`python held.py RUN ROUND ARGUMENT...` is `fednorms ARGUMENT...`, but waits after writing that round's row.

A test can then interrupt or kill the command at this point, however busy the machine is. The row is written but its
checkpoint is not, which is the hardest moment to continue from.
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
