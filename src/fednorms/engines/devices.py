"""Which device a recipe means, how exactly it computes, and what makes it repeatable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fednorms.core.errors import BadInput
from fednorms.core.noise import seed_of
from fednorms.core.option_names import option
from fednorms.core.precision import Precision

# cuBLAS on several streams is deterministic only with workspaces of fixed size. The variable is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pick_device(name: str) -> str:
    """Return the device that a recipe means, after checking that it is available.

    >>> pick_device("cpu")
    'cpu'
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not (name.split(":")[0] == "cuda" and torch.cuda.is_available()):
        called = " A GPU is called cuda." if name.lower() in ("gpu", "nvidia") else ""
        where = option("device").rstrip("=")
        raise BadInput(f'Device "{name}" is not available on this machine.{called} Use "cpu" or "auto" for {where}.')
    return name


def dtype_of(precision: Precision) -> torch.dtype:
    """The floating type in which a model is kept and averaged.

    >>> dtype_of("bfloat16"), dtype_of("float64")
    (torch.float32, torch.float64)
    """
    return torch.float64 if precision == "float64" else torch.float32


@contextmanager
def numerics(precision: Precision, deterministic: bool) -> Iterator[None]:
    """Within this context a GPU uses the recipe's precision (float32 is without TF32) and is repeatable if asked to be.

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


@contextmanager
def repeatable(threads: int, *names: object) -> Iterator[None]:
    """Within this context torch uses so many threads, and its global generator starts from a seed hashed from `names`.

    A model that draws from that generator (functional dropout) is repeatable, and the caller's generator is not moved.

    >>> with repeatable(1, "test"): a = torch.rand(1)
    >>> with repeatable(1, "test"): torch.equal(a, torch.rand(1))
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            torch.manual_seed(seed_of("torch", *names))
            yield
    finally:
        torch.set_num_threads(before)
