"""TensorBoard: event files next to the run, without a server or a network."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override

from fednorms.runs.tracking.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Write OUT/tensorboard, or runs/tensorboard/NAME-TIME for a run that is not stored."""

    @override
    def begin(self, run: TrackedRun, first: int) -> None:
        """Open the event file; points of rounds that a continued run repeats are dropped."""
        if run.group is not None:
            folder = run.group / "tensorboard" / run.name
        elif run.path is not None:
            folder = run.path / "tensorboard"
        else:  # of two runs with the same name, neither may hide the other
            folder = Path("runs/tensorboard") / f"{run.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.writer = SummaryWriter(str(folder), purge_step=first if first > 1 else None)
        self.writer.add_text("recipe", f"```toml\n{run.recipe.to_toml()}```")

    @override
    def log(self, t: int, values: Mapping[str, float]) -> None:
        """Add one point to every curve; they can be looked at while the run trains."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, t)
        self.writer.flush()

    @override
    def end(self, *, finished: bool) -> None:
        """Close the event file."""
        self.writer.close()
