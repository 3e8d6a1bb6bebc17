"""Test predictions in a run's directory, one file per round, mode and split: labels, probabilities, patients by number.

Intervals and differences between runs are computed from them, without the images. They hold no names of patients or
files.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from fednorms.core.errors import RunFailed
from fednorms.evaluation.predictions import Predictions
from fednorms.runs.store.atomic import clear_errors, write_atomic
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.store.seal import check_tensors, sealed_tensors

LIMIT = 64 * 2**20
"""Bytes per file up to which predictions are kept unless a recipe says otherwise."""


def size_of(images: int, classes: int) -> int:
    """The bytes of a file of predictions, nearly."""
    return images * (4 * classes + 8)


def file_of(directory: RunDirectory, round: int, label: str, split: str = "test") -> Path:
    """Where the predictions of a mode are.

    >>> file_of(RunDirectory("run"), 30, "global/batch:32").as_posix()
    'run/predictions/round-000030/global-batch-32-test.safetensors'
    """
    name = f"{label}/{split}".replace("/", "-").replace(":", "-")
    return _folder(directory, round) / f"{name}.safetensors"


def write(directory: RunDirectory, round: int, label: str, split: str, found: Mapping[str, Predictions]) -> None:
    """Write the predictions of a mode at all sites, atomically, with their hash."""
    tensors: dict[str, np.ndarray] = {}
    for site, p in found.items():
        tensors[f"labels/{site}"] = p.labels.astype(np.int32)
        tensors[f"probabilities/{site}"] = np.ascontiguousarray(p.probabilities, dtype=np.float32)
        if p.groups is not None:
            tensors[f"groups/{site}"] = np.unique(p.groups, return_inverse=True)[1].astype(np.int32)
    path = file_of(directory, round, label, split)
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, sealed_tensors(save(tensors)))


def read(directory: RunDirectory, round: int, label: str, split: str = "test") -> dict[str, Predictions] | None:
    """Read the predictions of a mode; None if they were not kept."""
    path = file_of(directory, round, label, split)
    try:
        data = path.read_bytes()
        check_tensors(data)
        tensors = load(data)
    except FileNotFoundError:
        return None
    except Exception as error:  # safetensors has its own exceptions
        raise RunFailed(f"Cannot read {path} ({error}). Remove it, and `{directory.resume_command}`.") from error
    sites = [key.removeprefix("labels/") for key in tensors if key.startswith("labels/")]
    return {
        s: Predictions(tensors[f"labels/{s}"], tensors[f"probabilities/{s}"], tensors.get(f"groups/{s}")) for s in sites
    }


def files(directory: RunDirectory) -> Sequence[Path]:
    """All files of predictions."""
    return sorted((directory.path / "predictions").glob("*/*.safetensors"))


def drop_others(directory: RunDirectory, rounds: Collection[int]) -> None:
    """Remove the predictions of other rounds: the run has gone on since."""
    kept = {_folder(directory, t) for t in rounds}
    for folder in (directory.path / "predictions").glob("round-*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(directory: RunDirectory, round: int) -> Path:
    return directory.path / "predictions" / f"round-{round:06d}"
