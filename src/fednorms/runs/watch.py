"""What Python callers see of a run while it trains: progress and trackers, next to their own callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednorms.core.errors import BadInput
from fednorms.core.options import quoted
from fednorms.runs.progress import Reporter, is_wanted
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import default_name
from fednorms.runs.store.checkpoint import kept_rounds
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.tracking.tracker import TrackedRun
from fednorms.runs.tracking.tracking import Tracking, asked_for

if TYPE_CHECKING:
    from fednorms.runs.result import Result
    from fednorms.runs.rounds import RoundEvent


@dataclass(frozen=True)
class Watch:
    """The callback for every round of a run, and notes of what could not be tracked."""

    callback: Callable[[RoundEvent], Any]
    tracking: Tracking

    def noted(self, result: Result) -> Result:
        """The result, with a note for each tracker that failed."""
        result.notes += self.tracking.notes
        return result


def reached(path: Path | None) -> int:
    """The round after which the run in a directory is continued; 0 if there is none."""
    try:
        return 0 if path is None else max(kept_rounds(RunDirectory(path).checkpoints), default=0)
    except OSError:  # no place for a run: creating it says so
        return 0


@contextmanager
def watching(
    recipe: Recipe,
    out: str | Path | None,
    callback: Callable[[RoundEvent], Any] | None,
    progress: bool | None,
    track: str | Sequence[str],
) -> Iterator[Watch]:
    """Show and track the rounds of a run; what the user's own callback returns is passed on."""
    if callback is not None and not callable(callback):
        raise BadInput(f"callback= must be a function that takes a RoundEvent, got {quoted(callback)}.")
    path, names = Path(out) if out else None, asked_for(track)
    name = path.name if path else default_name(recipe.method, recipe)
    with (
        Reporter(recipe.method, recipe.rounds, silent=not is_wanted(progress), start=reached(path)) as reporter,
        Tracking(names) as tracking,
    ):

        def after_round(event: RoundEvent) -> Any:  # noqa: ANN401
            reporter.round_done(event.round, event.row, event.scores, metric=event.recipe.metric)
            tracking.log(TrackedRun(name, event.recipe, path), event.row, event.scores)
            return callback(event) if callback else None

        yield Watch(after_round, tracking)
