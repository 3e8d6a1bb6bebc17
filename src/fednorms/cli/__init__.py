"""The command line. This file imports nothing heavy: help and mistyped commands are answered at once."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from fednorms.core.errors import FednormsError
from fednorms.core.options import nearest
from fednorms.runs.option_names import command_line

_GROUPS = {
    "Train": {
        "advise": "find out which method to take for a federation",
        "run": "train one method on a federation, and test it",
        "compare": "train several methods over several seeds, and print one table",
        "tune": "find the best learning rate and options of one method",
        "resume": "continue a run that was interrupted",
        "reproduce": "run a published table, and show our numbers next to the paper's",
    },
    "Use a trained model": {
        "evaluate": "test a run's models in any mode",
        "report": "write a run, comparison, table or advice as one HTML page",
        "predict": "classify images",
        "export": "write a model as plain weights, with its classes and preprocessing",
        "adapt": "give a new site a model that fits its images",
        "analyze": "measure what a figure of the papers shows, in your run",
    },
    "Data": {
        "data": "check data sets on disk, show them, and pack them into one file",
        "cache": "list and clear the cache of decoded images",
    },
    "Train across machines": {
        "deploy": "write a Flower project, and run its server and its sites",
    },
    "Look up": {
        "list": "list methods, models, federations, analyses, ...",
        "describe": "show what a method does to a model: routes, bytes, state, passes",
        "verify": "check the files of a run, model, comparison or pack for damage",
    },
}


def usage() -> str:
    """What `fednorms --help` prints.

    >>> print(usage().splitlines()[0])
    usage: fednorms COMMAND [OPTIONS]
    """
    lines = ["usage: fednorms COMMAND [OPTIONS]", "", "Federated learning across sites whose data look different."]
    for title, commands in _GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<10}{what}" for name, what in commands.items())]
    lines += [
        "",
        "For example:",
        "  fednorms run --method fedbn --rounds 20",
        '  fednorms compare --methods fedavg fedbn "scaffold + fedfn" --seeds 3',
        "",
        "`fednorms COMMAND --help` shows a command's options, --version the version.",
        "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (see `resume`).",
        "Set FEDNORMS_TRACEBACK=1 to see the traceback of an error.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    >>> main(["--version"]) == 0
    fednorms ...
    True
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name need not be valid text
    try:
        with warnings.catch_warnings(), command_line(), _interruptible():
            warnings.showwarning = _as_note
            code = _dispatch(args)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # the option parser has said why
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except FednormsError as error:
        if os.environ.get("FEDNORMS_TRACEBACK"):
            raise
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print(file=sys.stderr)  # below the ^C
        _say(str(interrupt) or "Interrupted.")
        return 130
    except BrokenPipeError:  # the reader has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from fednorms.core.error_origin import note

        note(error)  # below the traceback
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within this context, SIGTERM (schedulers, `kill`) interrupts like Ctrl-C: what was done is kept and said.

    An import that is interrupted may fail with any error, so every error after an interruption is one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    arrived = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        signal.default_int_handler(number, frame)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a command in the background ignores it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if arrived:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_note(message: Warning | str, *_: object, **__: object) -> None:
    """A warning in one line, without the place in the sources."""
    print(f"note: {' '.join(str(message).split())}", file=sys.stderr)


def _dispatch(args: list[str]) -> int:
    names = [name for commands in _GROUPS.values() for name in commands]
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from fednorms._version import __version__

        print(f"fednorms {__version__}")
        return 0
    command = "analyze" if args[0] == "analyse" else args[0]  # the spelling of version 0.1
    if command.startswith("-"):
        _say(f"A command comes first, as in `fednorms run {' '.join(args)}`. See `fednorms --help`.")
        return 2
    if command not in names:
        from fednorms.cli.mistakes import is_method

        if is_method(" ".join(args)):
            _say(f'"{" ".join(args)}" is a method. Train it with `fednorms run --method "{" ".join(args)}"`.')
            return 2
        _say(f'Unknown command "{command}": {nearest(command, names)}. See `fednorms --help`.')
        return 2
    name = "list_" if command == "list" else command  # a module `list` would hide Python's own in this file
    return int(getattr(import_module(f"fednorms.cli.{name}"), name)(args[1:]))


def _say(text: str) -> None:
    print(f"fednorms: {text}", file=sys.stderr)
