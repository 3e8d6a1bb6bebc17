"""How messages name an option: in the words of the interface that the user used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_interface: ContextVar[Literal["Python", "command line", "file"]] = ContextVar("_interface", default="Python")


@contextmanager
def command_line() -> Iterator[None]:
    """Within this context, messages name options as on the command line.

    >>> with command_line():
    ...     option("hold_out")
    '--hold-out'
    """
    token = _interface.set("command line")
    try:
        yield
    finally:
        _interface.reset(token)


@contextmanager
def recipe_file() -> Iterator[None]:
    """Within this context, messages name options as the keys of a file.

    >>> with recipe_file():
    ...     option("hold_out"), key("data.hold_out")
    ('hold_out', 'data.hold_out')
    """
    token = _interface.set("file")
    try:
        yield
    finally:
        _interface.reset(token)


def option(name: str) -> str:
    """The name of an option: `--hold-out` on the command line, `hold_out=` in Python.

    >>> option("hold_out")
    'hold_out='
    """
    interface = _interface.get()
    if interface == "file":
        return name
    return f"--{name.replace('_', '-')}" if interface == "command line" else f"{name}="


def setting(name: str, value: str) -> str:
    """An option with its value, to type as it is.

    >>> setting("size", "72x96")
    'size="72x96"'
    >>> with command_line():
    ...     setting("size", "72x96")
    '--size "72x96"'
    """
    between = {"Python": "", "command line": " ", "file": " = "}[_interface.get()]
    return f'{option(name)}{between}"{value}"'


def flag(name: str) -> str:
    """The name of a switch: `--skip-broken` on the command line, `skip_broken=True` in Python.

    >>> flag("skip_broken")
    'skip_broken=True'
    """
    interface = _interface.get()
    return option(name) + {"Python": "True", "command line": "", "file": " = true"}[interface]


def key(path: str) -> str:
    """The name of a recipe's key: where it is in a file, otherwise the option that sets it.

    >>> key("training.lr")
    'lr='
    >>> with command_line():
    ...     key("data.seed")
    '--data-seed'
    """
    interface = _interface.get()
    if interface == "file":
        return path
    return option("data_seed" if path == "data.seed" and interface == "command line" else path.rpartition(".")[2])
