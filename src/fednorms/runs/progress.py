"""Progress: a live bar on a terminal and in a notebook, a few lines elsewhere, nothing if quiet."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from fednorms.runs.pace import Pace

if TYPE_CHECKING:
    from fednorms.evaluation.scores import Scores
    from fednorms.runs.cells import CellEvent

PIPE = 100_000  # columns where there is no terminal: a row stays one line, for grep and cut
LINES = 10  # lines that a run prints where there is no terminal


class _Bars(Progress):
    """A progress bar with a line of text beneath it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, then the line."""
        yield from super().get_renderables()
        yield Text(self.below, no_wrap=True, overflow="ellipsis")


class _Left(ProgressColumn):
    """The time left, counted down between rounds."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self.reporter = reporter

    @override
    def render(self, task: Task) -> Text:
        return Text(self.reporter.left())


class _Cell:
    """The output of a notebook cell, replaced again and again; rich draws it."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self.html, self.handle = HTML, display(HTML(""), display_id=True)
        self.drawn = 0.0  # time of the last drawing

    def draw(self, bars: _Bars, *, at_once: bool = False) -> None:
        """Show the bars; at most ten times per second unless `at_once`."""
        if not at_once and time.monotonic() - self.drawn < 0.1:
            return
        paper = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False, highlight=False)
        paper.print(bars.get_renderable())
        self.handle.update(self.html(paper.export_html(inline_styles=True, code_format=_IN_A_CELL)))
        self.drawn = time.monotonic()


_IN_A_CELL = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class Reporter:
    """Shows progress over `total` rounds (or other units), of which a continued run had `start`.

    Call `round_done` after each.
    """

    def __init__(self, title: str, total: int, *, silent: bool = False, start: int = 0, unit: str = "round") -> None:
        self.title, self.total, self.silent, self.unit = title, total, silent, unit
        self.console: Console = stderr()
        self.done = start
        self.newest: dict[str, tuple[str, str]] = {}  # latest accuracies, shown in rounds without a test
        self.pace = Pace()
        self.bars: _Bars | None = None
        self.cell: _Cell | None = None

    def __enter__(self) -> Reporter:
        if not self.silent and _is_live(self.console):
            self.bars = _Bars(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn(self.unit if self.total == 1 else f"{self.unit}s"),
                _Left(self),
                console=self.console,
            )
            self.task = self.bars.add_task(self.title, total=self.total, completed=self.done)
            if self.console.is_jupyter:
                self.cell = _Cell()
                self.cell.draw(self.bars)
            else:
                self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bars and self.cell:
            self.cell.draw(self.bars, at_once=True)
        elif self.bars:
            self.bars.stop()

    def say(self, text: str) -> None:
        """Print a line apart from the bars."""
        if not self.silent:
            self.console.print(text, markup=False, soft_wrap=True)

    def round_done(
        self, done: int, row: Mapping[str, Any], scores: Mapping[str, Scores], name: str = "", metric: str = "accuracy"
    ) -> None:
        """Report that `done` rounds are finished; `row` is the latest one (of run `name`, if there are several).

        `metric` is the score that is shown, as in a recipe.
        """
        if tested := next((s for s in scores.values() if s.split == "test"), None):
            what = "balanced accuracy" if metric == "balanced_accuracy" else "accuracy"
            shown = domains_line(tested.judged_domains(metric))
            self.newest[name] = (f"{what} {per_cent(tested.judged(metric))}", f"({shown})")
        accuracy, domains = self.newest.get(name, ("", ""))
        loss = "" if row["train_loss"] is None else f"loss {row['train_loss']:.3f}"
        diverged = f"{len(row['diverged'])} diverged" if row["diverged"] else ""
        said = "  ".join(filter(None, (accuracy, loss, diverged, domains)))
        self.advance(done, f"{name}: {said}" if name else said)

    def advance(self, done: int, text: str, *, trained: bool = True) -> None:
        """Report that `done` rounds are finished, with a line of text; `trained`: the last of them just now."""
        before, self.done = self.done, done
        if trained:
            self.pace.trained(time.monotonic())
        if self.silent or done == before:
            return
        if self.bars:
            self.bars.below = text
            self.bars.update(self.task, completed=done)
            if self.cell:
                self.cell.draw(self.bars)
            return
        step = max(1, self.total // LINES)
        if before // step != done // step or done == self.total:
            left = f"  {text_left}" if (text_left := self.left()) else ""
            line = f"{self.title}  {self.unit} {done}/{self.total}  {text}{left}"
            self.console.print(line, markup=False, soft_wrap=True)

    def left(self) -> str:
        """The time left in words; empty while too little is known."""
        seconds = self.pace.left(self.total - self.done, time.monotonic())
        return "" if seconds is None else f"{duration(seconds)} left"


class CellWatch:
    """Counts the rounds of all runs of a comparison for a reporter."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.done: dict[str, int] = {}
        self.finished = 0

    def __call__(self, event: CellEvent) -> None:
        """Handle one event."""
        name = f"{event.label}, seed {event.seed}"
        if event.outcome is None:
            self.done[name] = event.round
            self.reporter.round_done(sum(self.done.values()), event.row, event.scores, name, event.metric)
            return
        self.finished += 1
        self.done[name] = event.rounds  # a failed run has no more rounds, either
        status = event.outcome.status
        self.reporter.advance(sum(self.done.values()), f"{name}: {status}", trained=False)
        if status != "done":
            self.reporter.say(f"{name} {status}: {event.outcome.error}")
        if event.outcome.details:  # an unexpected error: show where it arose
            self.reporter.say(event.outcome.details.rstrip())


def stderr() -> Console:
    """The console for progress."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE)


def is_wanted(progress: bool | None) -> bool:
    """Whether to show progress: as asked for; by default (None) on a terminal and in a notebook only.

    >>> is_wanted(True), is_wanted(False)
    (True, False)
    """
    return _is_live(stderr()) if progress is None else progress


def _is_live(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(95), duration(2 * 3600 + 60)
    ('1 min 35 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = f"{whole // 60} min {whole % 60:02d} s"
    return minutes if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def per_cent(share: float) -> str:
    """A share as a percentage.

    >>> per_cent(0.815)
    '81.5 %'
    """
    return f"{100 * share:.1f} %"


def domains_line(domains: Mapping[str, float], most: int = 8) -> str:
    """Accuracies per domain in one line; only the worst if there are many domains.

    >>> domains_line({"clean": 0.91, "faint": 0.4})
    'clean 91  faint 40'
    """
    shown = list(domains.items())
    if len(shown) > most:
        shown = sorted(shown, key=lambda item: item[1])[:most]
    line = "  ".join(f"{name} {100 * accuracy:.0f}" for name, accuracy in shown)
    return line if len(domains) <= most else f"worst of {len(domains)}: {line}"
