"""The library's exceptions; the command line maps each class to an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FednormsError(Exception):
    """Base of every error that the library raises deliberately; its text is for the user, without a traceback.

    >>> FednormsError.exit_code
    1
    """

    exit_code = 1


class BadInput(FednormsError, ValueError):
    """The user's input cannot be used: what is wrong, where, expected and found, and how to fix it (exit code 2).

    >>> BadInput.exit_code
    2
    """

    exit_code = 2


class RunFailed(FednormsError, RuntimeError):
    """A run that started could not continue (exit code 1); what it had finished is on disk.

    >>> RunFailed.exit_code
    1
    """


class Diverged(RunFailed):
    """A client's update, or the server's step, is not finite; names client and step, and the part and hook at fault."""


for _error in (FednormsError, BadInput, RunFailed, Diverged):
    _error.__module__ = "fednorms"  # a traceback names them as users import them


def refuse_class(what: str, given: object) -> None:
    """Refuse a class where an object is expected.

    >>> refuse_class("model", dict)
    Traceback (most recent call last):
    fednorms.BadInput: model: dict is a class. Pass an instance of it, dict(...), or a name.
    """
    if isinstance(given, type):
        name = given.__name__
        raise BadInput(f"{what}: {name} is a class. Pass an instance of it, {name}(...), or a name.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while writing a file that the user named into a `BadInput`.

    >>> with writing(Path("a/b.csv")):
    ...     raise PermissionError(13, "Permission denied")
    Traceback (most recent call last):
    fednorms.BadInput: Cannot write a/b.csv: Permission denied.
    """
    try:
        yield
    except OSError as error:
        raise BadInput(f"Cannot write {path}: {error.strerror or error}.") from None
