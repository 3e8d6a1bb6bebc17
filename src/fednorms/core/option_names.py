"""How messages name an option: in the words of the interface that the user used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_command_line = ContextVar("_on_command_line", default=False)


@contextmanager
def command_line() -> Iterator[None]:
    """Within this context, messages name options as on the command line.

    >>> with command_line():
    ...     option("hold_out")
    '--hold-out'
    """
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def option(name: str) -> str:
    """The name of an option: `--hold-out` on the command line, `hold_out=` in Python.

    >>> option("hold_out")
    'hold_out='
    """
    return f"--{name.replace('_', '-')}" if _on_command_line.get() else f"{name}="


def setting(name: str, value: str) -> str:
    """An option with its value, to type as it is.

    >>> setting("size", "72x96")
    'size="72x96"'
    >>> with command_line():
    ...     setting("size", "72x96")
    '--size "72x96"'
    """
    return f'{option(name)}{" " * _on_command_line.get()}"{value}"'


def flag(name: str) -> str:
    """The name of a switch: `--skip-broken` on the command line, `skip_broken=True` in Python.

    >>> flag("skip_broken")
    'skip_broken=True'
    """
    return option(name) + ("" if _on_command_line.get() else "True")
