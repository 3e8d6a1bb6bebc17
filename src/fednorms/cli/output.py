"""What commands print: results to stdout, progress and notes to stderr."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from fednorms.cli.grid import grid as grid

_PIPE = 100_000  # columns where there is no terminal: a row stays one line, for grep and cut


def stdout() -> Console:
    """The console for results; a file or a pipe gets one line per row, without control characters."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE)


def stderr() -> Console:
    """The console for progress."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE)


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
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
