"""What a reproduction tells while it runs; the command line shows it, a library call keeps quiet."""

from __future__ import annotations

from fednorms.runs.cells import CellEvent


class Observer:
    """Takes in remarks and progress, and does nothing with them.

    >>> Observer().say("nothing is printed")
    """

    wants_estimate = False
    """Whether it is worth timing a round of runs that nobody has timed yet."""

    def say(self, text: str) -> None:
        """A remark."""

    def begin(self, title: str, rounds: int) -> None:
        """Runs of so many rounds in all start."""

    def watch(self, event: CellEvent) -> None:
        """A round or a run is done."""

    def end(self) -> None:
        """Those runs are over, or were interrupted."""
