"""Measure in any run what the papers' figures show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from fednorms.core.paths import given_path
from fednorms.data import Federation
from fednorms.papers.analysis.divergence import DEAD
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
    round: int | None = None,
    client: str | None = None,
    dead: float = DEAD,
) -> Findings:
    """Apply an analysis to a run's directory and return plain numbers, curves and arrays; the run is not changed.

    `fn.analyze(run, name).plot()` draws them; `a.plot(b)` draws two runs with shared scales. `round` chooses a round
    instead of the last (or of all, for curves), `client` one client. `dead` belongs to the divergence: it leaves out
    channels whose variance at a client is less than this share of their mean variance.

    Analyses by round use the stored rounds (keep_checkpoints = "all" and checkpoint_every in the recipe) and train the
    next round of each again, because models right after local training are not stored. `fednorms list analyses` lists
    all. A run with a custom model or loss needs them again here.

    >>> import tempfile
    >>> from fednorms.runs.driver import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("fedavg", rounds=1, out=folder + "/run")
    ...     found = analyze(folder + "/run", "divergence")
    >>> list(found.scalars), found.arrays["divergence"].shape
    (['mean over pairs', 'channels left out', 'channels'], (5, 5))
    """
    stored = StoredRun(given_path("path", path), federation, model, loss, device, round, client, dead)
    found = analysis_named(name).measure(stored)
    return replace(found, analysis=name, label=stored.label)
