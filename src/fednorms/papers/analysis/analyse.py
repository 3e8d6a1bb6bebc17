"""Measure something of the papers' figures in a run of one's own."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fednorms.data import Federation
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.kept import Kept
from fednorms.papers.analysis.measures import analysis_named
from fednorms.runs.losses import Loss


def analyse(
    path: str | Path,
    name: str,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str | None = None,
) -> Findings:
    """What an analysis finds in a run's directory, as plain numbers, curves and arrays; the run is left as it is.

    Analyses by round read the rounds that the run kept (its recipe's keep_checkpoints = "all" and checkpoint_every) and
    train the next round of each once more, since models right after local training are not stored. `fednorms list
    analyses` shows all. A run with a model or a loss of your own needs the same again.

    >>> import tempfile
    >>> from fednorms.runs.driver import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("fedavg", rounds=1, out=folder + "/run")
    ...     found = analyse(folder + "/run", "divergence")
    >>> list(found.scalars), found.arrays["divergence"].shape
    (['mean over pairs'], (5, 5))
    """
    return analysis_named(name).measure(Kept(Path(path), federation, model, loss, device))
