"""The page of the command line: what `--help` prints, for every command. Made when the site is built."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

from fednorms.cli import main

HEAD = """\
# Command line

What `fednorms COMMAND --help` prints. Exit codes are 0 (done), 1 (failed), 2 (bad input) and 130 (interrupted; continue
with `fednorms resume`).
"""


def page() -> str:
    """The text of the page."""
    return HEAD + "".join(_section([command]) for command in commands(help_of([])))


def help_of(command: list[str]) -> str:
    """What a command prints when asked for help, without colors.

    >>> help_of(["run"]).split()[:3]
    ['usage:', 'fednorms', 'run']
    """
    plain = {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*command, "--help"])
    if code != 0:
        raise RuntimeError(f"`fednorms {' '.join(command)} --help` ends with exit code {code}")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def commands(text: str) -> list[str]:
    r"""The commands that a help text lists, if it is the help of a group.

    >>> commands("usage: fednorms data COMMAND [OPTIONS]\n\n  check     recognize\n  pack      write")
    ['check', 'pack']
    """
    if "COMMAND" not in text.partition("\n\n")[0]:
        return []
    listed = re.findall(r"^(?:│ |  )([a-z][a-z-]*) +\S", text, re.MULTILINE)
    return [name for name in listed if name != "fednorms"]  # which starts an example


def _section(command: list[str]) -> str:
    text = help_of(command)
    title = "#" * (len(command) + 1) + f" fednorms {' '.join(command)}"
    return f"\n{title}\n\n```text\n{text}\n```\n" + "".join(_section([*command, c]) for c in commands(text))
