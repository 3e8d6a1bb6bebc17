"""Which device a recipe means, and how exactly it computes there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fednorms.core.errors import BadInput

Precision = Literal["float32", "tf32", "bfloat16", "float64"]

# cuBLAS repeats bit for bit on several streams only with workspaces of fixed size; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pick_device(name: str) -> str:
    """The device that a recipe means, checked.

    >>> pick_device("cpu")
    'cpu'
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not (name.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise BadInput(f'Device "{name}" is not available here. Use device="cpu" or "auto".')
    return name


def dtype_of(precision: Precision) -> torch.dtype:
    """The floating type in which a model is kept and averaged.

    >>> dtype_of("bfloat16"), dtype_of("float64")
    (torch.float32, torch.float64)
    """
    return torch.float64 if precision == "float64" else torch.float32


@contextmanager
def numerics(precision: Precision, deterministic: bool) -> Iterator[None]:
    """Within this context a GPU computes as a recipe says: float32 without TF32, and repeatably unless told otherwise.

    >>> with numerics("float32", deterministic=True):
    ...     torch.backends.cudnn.deterministic
    True
    """
    before = (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )
    short = precision in ("tf32", "bfloat16")
    try:
        _set(deterministic, not deterministic, short, short)
        yield
    finally:
        _set(*before)


def _set(deterministic: bool, benchmark: bool, convolutions: bool, products: bool) -> None:
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products
