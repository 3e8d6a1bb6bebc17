"""Paths that a user gives: checked, and ~ is the user's home."""

from __future__ import annotations

import os
from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.core.option_names import option


def given_path(name: str, given: object) -> Path:
    """The path that was given as the argument `name`.

    >>> given_path("out", "runs/first")
    PosixPath('runs/first')
    >>> given_path("out", 3)
    Traceback (most recent call last):
    fednorms.BadInput: out= must be a path, such as "runs/first", got 3.
    """
    if isinstance(given, str | os.PathLike):
        return Path(os.path.expanduser(given))
    raise BadInput(f'{option(name)} must be a path, such as "runs/first", got {given!r}.')
