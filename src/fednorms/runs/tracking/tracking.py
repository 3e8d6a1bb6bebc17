"""Tracking of one or many runs: opens the trackers that `track=` names, and never lets one end a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.runs.option_names import option
from fednorms.runs.tracking.tracker import TrackedRun, Tracker, numbers

if TYPE_CHECKING:
    from fednorms.evaluation.scores import Scores

# The package that each needs (its extra has the tracker's name), and the class.
TRACKERS = {
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WandB"),
    "mlflow": ("mlflow", "MLflow"),
}


def asked_for(track: str | Sequence[str]) -> list[str]:
    """The trackers that were asked for; an unknown name or a missing package is an error before anything trains.

    >>> asked_for("tensorbord")
    Traceback (most recent call last):
    fednorms.BadInput: track= has no tracker "tensorbord": did you mean "tensorboard"? ...
    """
    names = list(dict.fromkeys([track] if isinstance(track, str) else track))
    for name in names:
        if name not in TRACKERS:
            raise BadInput(f'{option("track")} has no tracker "{name}": {nearest(name, TRACKERS)}')
        if find_spec(TRACKERS[name][0]) is None:
            package = "mlflow-skinny" if name == "mlflow" else TRACKERS[name][0]
            raise BadInput(
                f'{option("track")} "{name}" needs the package {package}. Install it with '
                f"`pip install 'fednorms[{name}]'`."
            )
    return names


def made(name: str) -> Tracker:
    """A new tracker."""
    return getattr(import_module(f"fednorms.runs.tracking.{name}"), TRACKERS[name][1])()


@dataclass
class Tracking:
    """The trackers of all runs; an error of one is a note, and that tracker hears no more of the run.

    Call `log` after each round and `close` when a run ends. As a context, it closes what is left open.
    """

    names: Sequence[str]
    notes: list[str] = field(default_factory=list)
    _open: dict[str, dict[str, Tracker]] = field(default_factory=dict)  # by run, those that work, by name

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for run in list(self._open):
            self.close(run, finished=kind is None)

    def log(self, run: TrackedRun, row: Mapping[str, Any], scores: Mapping[str, Scores]) -> None:
        """Log a round of a run; its first round opens the trackers."""
        if not self.names:
            return
        t = int(row["round"])
        if run.name not in self._open:
            self._open[run.name] = {}
            for name in self.names:
                with self._noting(run.name, name):
                    tracker = made(name)
                    tracker.begin(run, t)
                    self._open[run.name][name] = tracker
        values = numbers(row, scores)
        for name, tracker in list(self._open[run.name].items()):
            with self._noting(run.name, name):
                tracker.log(t, values)

    def close(self, run: str, *, finished: bool) -> None:
        """End the trackers of a run."""
        for name, tracker in self._open.pop(run, {}).items():
            with self._noting(run, name):
                tracker.end(finished=finished)

    @contextmanager
    def _noting(self, run: str, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker raises, the run is worth more
            self._open.get(run, {}).pop(name, None)
            said = " ".join(str(error).split())
            self.notes.append(f"{name} stopped tracking {run}: {type(error).__name__}: {said}")
