"""Weights & Biases; with WANDB_MODE=offline, files that `wandb sync` uploads later."""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb
from typing_extensions import override

from fednorms.runs.tracking.tracker import TrackedRun, Tracker


class WandB(Tracker):
    """One W&B run per run, in the project "fednorms" unless WANDB_PROJECT names another."""

    @override
    def begin(self, run: TrackedRun, first: int) -> None:
        """Start the run, or continue that of the same directory."""
        known = run.known("wandb") if first > 1 else None
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fednorms"),
            name=run.name,
            group=None if run.group is None else run.group.name,
            config=run.recipe.to_dict(),
            dir=None if run.home is None else str(run.home),
            id=known,
            resume="allow" if known else None,
            settings=wandb.Settings(console="off"),  # what is printed stays here
            reinit="create_new",  # runs of a comparison are open at the same time
        )
        run.remember("wandb", self.run.id)
        self.run.define_metric("*", step_metric="round")

    @override
    def log(self, t: int, values: Mapping[str, float]) -> None:
        """Log the numbers over the axis "round"."""
        self.run.log({"round": t, **values})

    @override
    def end(self, *, finished: bool) -> None:
        """Finish the run; W&B shows one that was cut short as failed."""
        self.run.finish(exit_code=0 if finished else 1)
