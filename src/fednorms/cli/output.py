"""What commands print: results to stdout, progress and notes to stderr."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console

from fednorms.cli.grid import grid as grid
from fednorms.runs.progress import PIPE
from fednorms.runs.progress import per_cent as per_cent
from fednorms.runs.progress import stderr as stderr


def stdout() -> Console:
    """The console for results; a file or a pipe gets one line per row, without control characters."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE)


@contextmanager
def continued_by_repeating() -> Iterator[None]:
    """Within this context, an interruption says that the same command continues."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Continue with the same command.") from None


def print_text(text: str) -> None:
    """Print lines of a result; in a narrow terminal they fold between words, below their last column.

    >>> print_text("  up    8 tensors   conv1.weight, ...")
      up    8 tensors   conv1.weight, ...
    """
    width = stdout().width
    for line in text.splitlines():
        columns = [gap.end() for gap in re.finditer(r"(?:^|\S) {2,}(?=\S)", line) if gap.end() <= width * 0.6]
        hanging = " " * max(columns, default=2)
        folded = textwrap.wrap(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
        print("\n".join(folded))


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that are not finite become null.

    >>> print_json({"loss": float("nan"), "rounds": 3})
    {
      "loss": null,
      "rounds": 3
    }
    """
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))


class _Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def print_result(found: _Result, *, as_json: bool) -> None:
    """Print what a command found: its repr, or one JSON object."""
    if as_json:
        print_json(found.to_dict())
    else:
        print_text(repr(found))


def plain(value: Any) -> Any:  # noqa: ANN401
    """A value for JSON, with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
