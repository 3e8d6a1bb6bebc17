"""MLflow: a local database, or the server that MLFLOW_TRACKING_URI or mlflow.set_tracking_uri names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from typing_extensions import override

from fednorms.runs.tracking.tracker import TrackedRun, Tracker

_AT_ONCE = {"metrics": 1000, "params": 100}  # MLflow takes no more in one request
_LONGEST = 6000  # characters of a parameter


class MLflow(Tracker):
    """One MLflow run per run, in the experiment "fednorms" unless MLFLOW_EXPERIMENT_NAME names another."""

    @override
    def begin(self, run: TrackedRun, first: int) -> None:
        """Create the run, or continue that of the same directory."""
        self.client = MlflowClient()
        if first > 1 and (known := run.known("mlflow")):
            self.id = known
            self.client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fednorms")
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        tags = {} if run.group is None else {"comparison": run.group.name}
        self.id = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        run.remember("mlflow", self.id)
        params = [Param(key, value[:_LONGEST]) for key, value in _flat(run.recipe.to_dict())]
        for start in range(0, len(params), _AT_ONCE["params"]):
            self.client.log_batch(self.id, params=params[start : start + _AT_ONCE["params"]])
        self.client.log_text(self.id, run.recipe.to_toml(), "recipe.toml")

    @override
    def log(self, t: int, values: Mapping[str, float]) -> None:
        """Log the numbers as step t."""
        now = int(1000 * time.time())
        metrics = [Metric(_legal(name), value, now, t) for name, value in values.items()]
        for start in range(0, len(metrics), _AT_ONCE["metrics"]):
            self.client.log_batch(self.id, metrics=metrics[start : start + _AT_ONCE["metrics"]])

    @override
    def end(self, *, finished: bool) -> None:
        """Close the run."""
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _legal(name: str) -> str:
    """A name that MLflow takes: letters, digits and a few signs."""
    return re.sub(r"[^\w\-. :/]", "_", name)
