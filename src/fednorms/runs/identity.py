"""What a user brings along, told apart: code of parts and losses, code and tensors of a model, as short hashes."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType

import numpy as np
import torch
from torch import Tensor, nn

from fednorms.core.blame import LIBRARIES, of_user
from fednorms.core.errors import BadInput, refuse_class
from fednorms.core.method import Method

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TOLD = (bool, int, float, complex, str, bytes, tuple, frozenset)  # not what a run may fill, as a list of what it saw


def code_hash(thing: object) -> str:
    """A hash of what a function, class or callable object does: its source (or bytecode), and the values it holds.

    What it reaches by name in files of the user's own counts, too: functions, classes, constants.

    >>> code_hash(lambda x: x + 1) == code_hash(lambda x: x + 2)
    False
    >>> code_hash(partial(max, 1)) == code_hash(partial(max, 2))
    False
    """
    return _digest(_code(thing))


def model_hash(model: nn.Module) -> str:
    """Hashes of a model's code and layers, and of its tensors: CODE.WEIGHTS.

    >>> torch.manual_seed(0) and None
    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> model_hash(a) == model_hash(a), model_hash(a) == model_hash(b)
    (True, False)
    >>> model_hash(a).partition(".")[0] == model_hash(b).partition(".")[0]
    True
    """
    return f"{_digest(_layers(model))}.{_digest(_value(dict(model.state_dict())))}"


def own_parts(method: Method) -> dict[str, str]:
    """The parts of a method that do not come with the library, each with a hash of its code.

    >>> from fednorms.methods.registry import method
    >>> own_parts(method("fedbn + fedfn"))
    {}
    """
    return {p.name: code_hash(type(p)) for p in method.parts if not _of_library(type(p))}


def own_model(model: nn.Module) -> str:
    """How a recipe names a model that was handed over: custom:CLASS@CODE.WEIGHTS."""
    refuse_class("model", model)
    if not isinstance(model, nn.Module):
        raise BadInput(f"model: expected a name or an nn.Module, got {type(model).__name__}.")
    return f"custom:{type(model).__name__}@{model_hash(model)}"


def own_loss(loss: Callable[..., Tensor]) -> str:
    """How a recipe names a loss that was handed over: custom:NAME@CODE."""
    refuse_class("loss", loss)
    return f"custom:{getattr(loss, '__name__', type(loss).__name__)}@{code_hash(loss)}"


def named(text: str) -> str:
    """The name alone of something of the user's own.

    >>> named("custom:Net@12ab.34cd")
    'Net'
    """
    return text.removeprefix("custom:").partition("@")[0]


def same_code(text: str, other: str) -> bool:
    """Whether two such names differ in first weights at most.

    >>> same_code("custom:Net@12.34", "custom:Net@12.56"), same_code("custom:Net@12.34", "custom:Net@13.34")
    (True, False)
    """
    return text.partition(".")[0] == other.partition(".")[0]


def _digest(pieces: Iterator[bytes]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece + b"\0")
    return found.hexdigest()[:12]


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _layers(model: nn.Module) -> Iterator[bytes]:
    kinds = dict.fromkeys(type(m) for m in model.modules())
    yield from (piece for kind in kinds if not _of_library(kind) for piece in _code(kind))
    for name, m in model.named_modules():
        yield f"{name} {type(m).__qualname__}".encode()
        yield from _value({k: v for k, v in vars(m).items() if k[0] != "_" and k != "training"})


def _code(thing: object, seen: set[int] | None = None) -> Iterator[bytes]:
    """What a thing does, piece by piece; `seen` are the functions and classes that were told already."""
    seen = set() if seen is None else seen
    if isinstance(thing, partial):
        yield from _code(thing.func, seen)
        yield from _value([thing.args, thing.keywords], seen)
    elif isinstance(thing, MethodType):
        yield from _code(thing.__func__, seen)
        yield from _code(thing.__self__, seen)
    elif isinstance(thing, type):
        for kind in thing.__mro__:
            if _of_library(kind) or id(kind) in seen:
                continue
            seen.add(id(kind))
            yield from _source(kind) or _members(kind)
            for function in _functions(kind):
                yield from _reached(function, seen)
    elif inspect.isfunction(thing):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        anonymous = thing.__name__ == "<lambda>"  # its source is the line on which it stands
        yield from (() if anonymous else _source(thing)) or _bytecode(thing.__code__)
        yield from _value([thing.__defaults__, thing.__kwdefaults__, _closed_over(thing)], seen)
        yield from _reached(thing, seen)
    elif isinstance(thing, nn.Module):
        yield model_hash(thing).encode()
    elif inspect.isbuiltin(thing):
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
    else:
        yield from _code(type(thing), seen)
        yield from _value(getattr(thing, "__dict__", {}), seen)


def _unwrapped(value: object) -> object:
    """The function in a static or class method or a property; else the value."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _functions(kind: type) -> Iterator[FunctionType]:
    for inner in map(_unwrapped, vars(kind).values()):
        if inspect.isfunction(inner) and inner.__module__ == kind.__module__:  # not what a decorator has put there
            yield inner


def _reached(function: FunctionType, seen: set[int]) -> Iterator[bytes]:
    """What a function of the user's own reaches by the names it uses."""
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, type) or inspect.isfunction(value):
            if of_user(value.__module__):
                yield name.encode()
                yield from _code(value, seen)
        elif value is not None and isinstance(value, _TOLD):
            yield name.encode()
            yield from _value(value, seen)


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _closed_over(function: FunctionType) -> list[object]:
    found: list[object] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that has no value yet
            found.append(cell.cell_contents)
    return found


def _source(thing: object) -> list[bytes]:
    try:
        return [inspect.getsource(thing).encode()]  # type: ignore[arg-type]
    except (OSError, TypeError):  # typed in, or made by code
        return []


def _members(kind: type) -> Iterator[bytes]:
    for name, value in vars(kind).items():
        inner = _unwrapped(value)
        if inspect.isfunction(inner):
            yield name.encode()
            yield from _bytecode(inner.__code__)
        elif not name.startswith("__"):
            yield name.encode()
            yield from _value(inner)


def _bytecode(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        yield from _bytecode(constant) if isinstance(constant, CodeType) else _value(constant)


def _value(value: object, seen: set[int] | None = None) -> Iterator[bytes]:
    """What can be told of a value without an address in memory."""
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().resolve_conj() if isinstance(value, Tensor) else torch.from_numpy(value)
        yield f"{array.dtype} {tuple(array.shape)}".encode()
        yield array.contiguous().flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b""
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield repr(key).encode() if isinstance(key, _PLAIN) else type(key).__qualname__.encode()
            yield from _value(inner, seen)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _value(inner, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(b"".join(_value(inner, seen)) for inner in value)
    elif inspect.isfunction(value) or isinstance(value, partial | MethodType):
        yield from _code(value, seen)
    else:
        yield type(value).__qualname__.encode()
