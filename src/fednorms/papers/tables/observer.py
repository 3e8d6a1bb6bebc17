"""Who hears of a table while it runs: nobody, or the terminal or notebook."""

from __future__ import annotations

from typing_extensions import override

from fednorms.runs.cells import CellEvent
from fednorms.runs.progress import CellWatch, Reporter


class Observer:
    """Receive remarks and progress, and ignore them; `Shown` shows them.

    >>> Observer().say("nothing is printed")
    """

    wants_estimate = False
    """Whether to time a few rounds if no finished run tells how long the others take."""

    def say(self, text: str) -> None:
        """Receive a remark."""

    def begin(self, title: str, rounds: int) -> None:
        """Start runs with so many rounds in total."""

    def watch(self, event: CellEvent) -> None:
        """Receive the end of a round or of a run."""

    def end(self) -> None:
        """End these runs, or their interruption."""


class Shown(Observer):
    """Show remarks and progress on stderr or in a notebook."""

    def __init__(self, silent: bool = False) -> None:
        self.silent, self.wants_estimate = silent, not silent
        self.reporter = Reporter("", 0, silent=silent)
        self.cells: CellWatch | None = None

    @override
    def say(self, text: str) -> None:
        """Print a remark."""
        self.reporter.say(text)

    @override
    def begin(self, title: str, rounds: int) -> None:
        """Show a bar for these runs."""
        self.reporter = Reporter(title, rounds, silent=self.silent)
        self.reporter.__enter__()
        self.cells = CellWatch(self.reporter)

    @override
    def watch(self, event: CellEvent) -> None:
        """Advance the bar."""
        assert self.cells is not None
        self.cells(event)

    @override
    def end(self) -> None:
        """Remove the bar."""
        self.reporter.__exit__(None, None, None)
