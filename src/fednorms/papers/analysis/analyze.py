"""Measure in any run what the papers' figures show."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fednorms.data import Federation
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.measures import analysis_named
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.runs.losses import Loss


def analyze(
    path: str | Path,
    name: str,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str | None = None,
) -> Findings:
    """Apply an analysis to a run's directory and return plain numbers, curves and arrays; the run is not changed.

    Analyses by round use the stored rounds (keep_checkpoints = "all" and checkpoint_every in the recipe) and train the
    next round of each again, because models right after local training are not stored. `fednorms list analyses` lists
    all. A run with a custom model or loss needs them again here.

    >>> import tempfile
    >>> from fednorms.runs.driver import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("fedavg", rounds=1, out=folder + "/run")
    ...     found = analyze(folder + "/run", "divergence")
    >>> list(found.scalars), found.arrays["divergence"].shape
    (['mean over pairs'], (5, 5))
    """
    return analysis_named(name).measure(StoredRun(Path(path), federation, model, loss, device))
