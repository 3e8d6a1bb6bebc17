"""Random numbers inside a training step, from a counter-based hash instead of torch's global generator.

A number depends only on (seed, round, client, step, stream, position). So a step draws the same numbers in every
engine, on every device and on any number of streams, and adding a part never shifts another part's numbers.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
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
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "big") >> 1


def permutation(n: int, *names: object) -> Tensor:
    """The numbers 0 to n - 1 in an order hashed from names.

    >>> permutation(4, "test order", "clinic").sort().values.tolist()
    [0, 1, 2, 3]
    """
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(*names)))


def stream(name: str) -> int:
    """The 32-bit stream number of a layer or part, hashed from its name.

    >>> stream("features.drop") == stream("features.drop") != stream("drop")
    True
    """
    return seed_of("stream", name) & _MASK


# Odd 64-bit constants with about as many ones as zeros, as signed numbers; products wrap around.
_KEY, _STEP, _STREAM = -0x61C8864680B583EB, -0x4B47D0C5A1B5A8E5, 0x2545F4914F6CDD1D
_FIRST, _SECOND = -0x00AE502812AA7333, -0x3B314601E57A13AD
_constants: dict[tuple[str, int, torch.device], Tensor] = {}  # kept for good: recorded graphs read them


def _finish(x: Tensor) -> Tensor:
    # Two products with a fold between: the top bits depend on all bits of x.
    x = x * _FIRST
    return (x ^ (x >> 32)) * _SECOND


def _positions(n: int, device: torch.device) -> Tensor:
    # One well mixed number per position; draws that start from these need few operations.
    def made(size: int) -> Tensor:
        x = torch.arange(1, size + 1, device=device) * _KEY
        return _finish(x ^ (x >> 29))

    return _constant("positions", 1 << max(10, (n - 1).bit_length()), device, made)[:n]


def _factors(device: torch.device) -> Tensor:
    return _constant("factors", 2, device, lambda size: torch.tensor([_KEY, _STEP], device=device))


def _constant(name: str, size: int, device: torch.device, made: Callable[[int], Tensor]) -> Tensor:
    key = name, size, device
    if key not in _constants:
        new = made(size)
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():  # lives in that graph only
                return new
            torch.cuda.current_stream(device).synchronize()  # other streams read it too
        _constants[key] = new
    return _constants[key]


def _unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The top 23 bits and a half step: exact in float32, so never 0 and never 1 (whose Gumbel number would be infinite).
    return ((x >> 41) & 0x7FFFFF).to(dtype).add_(0.5).mul_(2.0**-23)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def hashed_uniform(key: Tensor, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniforms in (0, 1) of the given shape from a key (int64 tensor of two 32-bit words) and a stream number.

    >>> key = torch.tensor([7, 11])
    >>> a = hashed_uniform(key, 3, (2, 2), torch.float64)
    >>> torch.equal(a, hashed_uniform(key, 3, (2, 2), torch.float64)) and bool(((a > 0) & (a < 1)).all())
    True
    """
    word = (key * _factors(key.device)).sum() + _signed(number * _STREAM)
    return _unit(_finish(_positions(math.prod(shape), key.device) ^ word), dtype).reshape(tuple(shape))


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
    """Restart the count of draws, so every forward pass of a step (GReg has two) gets the same numbers.

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

    Outside `keyed` (a module that a user trains without fednorms) they come from torch's own generator.

    >>> uniform((2, 3), 1, torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    key, calls = _active.get(), _calls.get()
    if key is None or calls is None:
        return torch.rand(tuple(shape), dtype=like.dtype, device=like.device).clamp_(2.0**-25, 1 - 2.0**-24)
    call = calls[number] = calls.get(number, -1) + 1
    return hashed_uniform(key, (number + 0x9E3779B9 * call) & _MASK, shape, like.dtype)


def normals(like: Tensor, *names: object) -> Tensor:
    """Standard normal numbers of a tensor's shape in float64, seeded by names: the same for every device and engine.

    >>> torch.equal(normals(torch.zeros(3), "a", 1), normals(torch.zeros(3), "a", 1))
    True
    """
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed_of(*names)), dtype=torch.float64)


def secret_normals(like: Tensor) -> Tensor:
    """Standard normal numbers of a tensor's shape in float64 that nobody can repeat: from the operating system's bits.

    Paper: Secure Random Sampling in Differential Privacy. Holohan and Braghin. ESORICS 2021.
    https://arxiv.org/abs/2107.10138

    Each is the sum of four, halved: the rounding of a single one would reveal which sums were possible.

    >>> secret_normals(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    pairs = 2 * like.numel()
    bits = torch.frombuffer(bytearray(os.urandom(16 * pairs)), dtype=torch.int64).reshape(2, pairs) if pairs else None
    if bits is None:
        return torch.zeros(like.shape, dtype=torch.float64)
    radius, angle = ((bits & (2**53 - 1)).to(torch.float64) + 0.5) * 2.0**-53
    radius = (-2 * radius.log()).sqrt()
    both = torch.cat([radius * (2 * math.pi * angle).cos(), radius * (2 * math.pi * angle).sin()])
    return both.reshape(4, -1).sum(0).div_(2).reshape(like.shape)
