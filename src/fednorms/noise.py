"""Random numbers inside a training step, from a counter-based hash instead of torch's global generator.

A number depends only on (seed, round, client, step, stream, position). So a step draws the same numbers in every
engine, on every device and on any number of streams, and adding a part never shifts another part's numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_active: ContextVar[Tensor | None] = ContextVar("fednorms_noise_key", default=None)
_calls: ContextVar[dict[int, int] | None] = ContextVar("fednorms_noise_calls", default=None)
_MASK = 0xFFFFFFFF


def seed_of(*names: object) -> int:
    """A 63-bit seed hashed from names, the only source of seeds in the library.

    >>> seed_of("data", 0, 3, "hospital-a") == seed_of("data", 0, 3, "hospital-a")
    True
    >>> seed_of("data", 0, 31) == seed_of("data", 0, 3, 1)
    False
    """
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(name: str) -> int:
    """The 32-bit stream number of a layer or part, hashed from its name.

    >>> stream("features.drop") == stream("features.drop") != stream("drop")
    True
    """
    return seed_of("stream", name) & _MASK


def _mix(x: Tensor) -> Tensor:
    # A 32-bit integer finaliser (full avalanche) held in int64, so that it runs on every device.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def hashed_uniform(key: Tensor, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniforms in (0, 1) of the given shape from a key (int64 tensor of two 32-bit words) and a stream number.

    >>> key = torch.tensor([7, 11])
    >>> a = hashed_uniform(key, 3, (2, 2), torch.float64)
    >>> torch.equal(a, hashed_uniform(key, 3, (2, 2), torch.float64)) and bool(((a > 0) & (a < 1)).all())
    True
    """
    counter = torch.arange(math.prod(shape), device=key.device)
    word = _mix(_mix(key[0] ^ number) ^ key[1])
    bits = _mix(_mix(counter ^ word) + (key[0] & 0xFFFF))
    # 24 bits and a half step: exactly representable in float32, never 0 and never 1.
    return (((bits & _MASK) >> 8).to(dtype) + 0.5).mul_(2.0**-24).reshape(tuple(shape))


@contextmanager
def keyed(key: Tensor) -> Iterator[None]:
    """Within this context `uniform` draws from `key`; a second draw from a stream gives other numbers.

    >>> with keyed(torch.tensor([1, 2])):
    ...     a, b = uniform((3,), 5, torch.zeros(1)), uniform((3,), 5, torch.zeros(1))
    >>> with keyed(torch.tensor([1, 2])):
    ...     torch.equal(a, uniform((3,), 5, torch.zeros(1))), torch.equal(a, b)
    (True, False)
    """
    token = _active.set(key)
    try:
        with one_pass():
            yield
    finally:
        _active.reset(token)


@contextmanager
def one_pass() -> Iterator[None]:
    """Count draws afresh, so that every forward pass of a step meets the same numbers (GReg's two, say).

    >>> with keyed(torch.tensor([1, 2])):
    ...     a = uniform((3,), 5, torch.zeros(1))
    ...     with one_pass():
    ...         torch.equal(a, uniform((3,), 5, torch.zeros(1)))
    True
    """
    token = _calls.set({})
    try:
        yield
    finally:
        _calls.reset(token)


def uniform(shape: Sequence[int], number: int, like: Tensor) -> Tensor:
    """Uniforms in (0, 1) for a layer with stream `number`, with the dtype and device of `like`.

    Outside `keyed` (a plain module that a user trains without fednorms) they come from torch's own generator.

    >>> uniform((2, 3), 1, torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    key, calls = _active.get(), _calls.get()
    if key is None or calls is None:
        return torch.rand(tuple(shape), dtype=like.dtype, device=like.device).clamp_(2.0**-25, 1 - 2.0**-24)
    call = calls[number] = calls.get(number, -1) + 1
    return hashed_uniform(key, (number + 0x9E3779B9 * call) & _MASK, shape, like.dtype)
