"""After training: open a run, test it again, predict, export, load, and adapt it to a new site."""

from __future__ import annotations

from fednorms.runs.adapting import Adapted, adapt
from fednorms.runs.evaluating import evaluate_run
from fednorms.runs.exporting import Exported, export
from fednorms.runs.loading import LoadedModel, load_model
from fednorms.runs.opened import OpenRun, open_run
from fednorms.runs.predicting import Prediction, predict

__all__ = [
    "Adapted",
    "Exported",
    "LoadedModel",
    "OpenRun",
    "Prediction",
    "adapt",
    "evaluate_run",
    "export",
    "load_model",
    "open_run",
    "predict",
]
