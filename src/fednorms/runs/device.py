"""What "auto" means: the device that a run began on, otherwise a GPU if there is one; and why a GPU is not used."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

import torch

from fednorms.engines.devices import pick_device
from fednorms.runs.store.directory import RunDirectory


def device_of(asked: str, continued: Iterable[RunDirectory]) -> str:
    """The device to ask for: for "auto", the one on which one of these runs began, if it is here.

    The same command then continues a run bit for bit, also one of version 0.1, which used the CPU by default.

    >>> device_of("auto", []), device_of("cpu", [])
    ('auto', 'cpu')
    """
    for directory in continued if asked == "auto" else ():
        try:
            began = str(tomllib.loads(directory.recipe.read_text(encoding="utf-8")).get("device", "cpu"))
        except (OSError, ValueError):  # no run there, or not one that can be read: creating it says so
            continue
        if began == "cpu" or torch.cuda.is_available():
            return began
    return asked


def own_device(asked: str, recorded: str) -> str:
    """Where to use a trained model: for "auto", the device that the run recorded, or the CPU if it is not here.

    >>> own_device("auto", "cpu")
    'cpu'
    """
    if asked != "auto":
        return pick_device(asked)
    return "cuda" if recorded.startswith("cuda") and torch.cuda.is_available() else "cpu"


def unused_gpu(asked: str) -> str:
    """Why "auto" does not use a GPU that this machine has; empty if it has none, or uses it.

    >>> unused_gpu("cpu")
    ''
    """
    if asked != "auto" or torch.cuda.is_available():
        return ""
    if Path("/dev/nvidia0").exists():
        if torch.version.cuda is None:
            why = f"torch {torch.__version__} is built without CUDA; install a build with CUDA"
        elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            why = "CUDA_VISIBLE_DEVICES hides it"
        else:
            why = f"torch {torch.__version__} cannot use it; its driver may be too old for CUDA {torch.version.cuda}"
        return f"the run uses the CPU although there is a GPU: {why}"
    if torch.backends.mps.is_available():
        return "the run uses the CPU: fednorms does not support Apple's GPU (mps)"
    return ""
