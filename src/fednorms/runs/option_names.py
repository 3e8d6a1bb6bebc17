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


def flag(name: str) -> str:
    """The name of a switch: `--skip-broken` on the command line, `skip_broken=True` in Python.

    >>> flag("skip_broken")
    'skip_broken=True'
    """
    return option(name) + ("" if _on_command_line.get() else "True")


# What other libraries call our options.
ELSEWHERE = {
    "algorithm": "method",
    "aggregator": "method",
    "strategy": "method",
    "dataset": "federation",
    "net": "model",
    "network": "model",
    "arch": "model",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "communication_rounds": "rounds",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "bs": "batch_size",
    "batchsize": "batch_size",
    "local_batch_size": "batch_size",
    "optim": "optimizer",
    "scheduler": "schedule",
    "lr_schedule": "schedule",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "warmup_rounds": "warmup",
    "gpu": "device",
    "image_size": "size",
    "callbacks": "callback",
    "output": "out",
    "out_dir": "out",
    "output_dir": "out",
    "num_workers": "workers",
}
