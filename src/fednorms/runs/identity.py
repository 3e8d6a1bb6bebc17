"""Custom objects of the user: how a recipe names them, and short hashes that tell them apart.

Parts and losses are hashed by their code, a model by its code and its tensors.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednorms.core.error_origin import LIBRARIES, of_user
from fednorms.core.errors import BadInput, refuse_class
from fednorms.core.method import Method
from fednorms.core.optim import MakeOptimizer, name_of
from fednorms.core.options import quoted
from fednorms.core.training import CUSTOM
from fednorms.data import Federation
from fednorms.data.registry import federation as make_federation
from fednorms.models import models
from fednorms.models.custom import bare, find
from fednorms.runs.callables import NO_CALLABLES, Callables, Epochs, Schedule
from fednorms.runs.losses import Loss

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONSTANT = (bool, int, float, complex, str, bytes, tuple, frozenset)  # a run may fill a list or a dictionary


def code_hash(thing: object) -> str:
    """Hash what a function, class or callable object does: its source (or bytecode), and the values it holds.

    Functions, classes and constants that it reaches by name in the user's own files count, too.

    >>> code_hash(lambda x: x + 1) == code_hash(lambda x: x + 2)
    False
    >>> code_hash(partial(max, 1)) == code_hash(partial(max, 2))
    False
    """
    return _digest(_code(thing))


def model_hash(model: nn.Module) -> str:
    """Hash a model's code and layers, and its tensors: CODE.WEIGHTS.

    >>> torch.manual_seed(0) and None
    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> model_hash(a) == model_hash(a), model_hash(a) == model_hash(b)
    (True, False)
    >>> model_hash(a).partition(".")[0] == model_hash(b).partition(".")[0]
    True
    """
    return f"{_digest(_layers(model))}.{_digest(_value(dict(model.state_dict())))}"


def own_parts(method: Method) -> dict[str, str]:
    """The custom parts of a method, each with a hash of its code.

    >>> from fednorms.methods.registry import method
    >>> own_parts(method("fedbn + fedfn"))
    {}
    """
    return {p.name: _REMEMBERED.get(type(p)) or code_hash(type(p)) for p in method.parts if not _of_library(type(p))}


_REMEMBERED: dict[type, str] = {}


def remember_code(cls: type, code: str) -> None:
    """Use this hash for a class whose source text is in another process."""
    _REMEMBERED[cls] = code


def own_model(model: nn.Module) -> str:
    """How a recipe names a custom model: custom:CLASS@CODE.WEIGHTS."""
    refuse_class("model", model)
    if not isinstance(model, nn.Module):
        raise BadInput(f"model= must be a name or an nn.Module, got {type(model).__name__}.")
    return f"custom:{type(model).__name__}@{model_hash(model)}"


def named_model(name: str) -> str:
    """How a recipe records a model that it names: with a hash of its code, unless it is of a library.

    >>> named_model("cnn-small")
    'cnn-small'
    >>> named_model("fednorms.models.lenet:LeNet").partition("@")[0]
    'fednorms.models.lenet:LeNet'
    """
    make = None if bare(name) in models() else find(name)
    return name if make is None else f"{bare(name)}@{code_hash(make)}"


@dataclass(frozen=True)
class Custom:
    """Objects that the user passed in place of what a recipe names."""

    federation: Federation | None = None
    model: nn.Module | None = None
    loss: Loss | None = None
    training: Callables = NO_CALLABLES

    @classmethod
    def of(
        cls,
        federation: str | Path | Federation | None,
        model: str | nn.Module | None,
        loss: str | Loss | None,
        training: Callables = NO_CALLABLES,
    ) -> Custom:
        """The objects among these arguments; the others are names."""
        return cls(
            federation if isinstance(federation, Federation) else None,
            model if isinstance(model, nn.Module) else None,
            loss if callable(loss) else None,
            training,
        )


def recipe_keys(
    federation: str | Path | Federation | None,
    model: str | nn.Module | None,
    loss: str | Loss | None,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """How a recipe names the federation, model and loss that were given; `data` are its data settings so far.

    A federation object is recorded by the name and options that made it, or as custom:NAME if it was changed. The data
    settings that define a federation then come from the object; the rest (such as `augment`) still apply.

    >>> from fednorms.data.registry import federation
    >>> keys = recipe_keys(federation("digits-shift", size=8), None, None, {"size": 32, "augment": "flip"})
    >>> keys["federation"], keys["data"]
    ('digits-shift', {'augment': 'flip', 'size': 8})
    >>> recipe_keys(federation("digits-shift").hold_out("faint"), "cnn-small", None, {})
    {'federation': 'custom:digits-shift', 'model': 'cnn-small'}
    """
    keys: dict[str, Any] = {}
    if isinstance(federation, Federation):
        keys |= _federation_keys(federation, data)
    elif federation is not None:
        if not isinstance(federation, str | Path):
            raise BadInput(
                f"federation= must be a name, a folder or a Federation, got {quoted(type(federation).__name__)}. "
                "For arrays, write fednorms.from_arrays({SITE: (images, labels), ...})."
            )
        keys["federation"] = str(federation)
    if model is not None:
        keys["model"] = model if isinstance(model, str) else own_model(model)
    if loss is not None:
        keys["loss"] = own_loss(loss) if callable(loss) else loss
    return keys


def _federation_keys(given: Federation, data: Mapping[str, Any]) -> dict[str, Any]:
    calls = {
        "hold_out": "federation.hold_out(...)",
        "proxy": "federation.with_proxy(...)",
        "partition": "fednorms.partition(federation, ...)",
    }
    for key, call in calls.items():
        if value := data.get(key):
            raise BadInput(
                f"The recipe has data.{key} = {value!r}, which is only for a federation that the recipe names. "
                f"Leave it out, and divide the federation before the run with {call}."
            )
    if given.asked_for is None:
        return {"federation": f"custom:{given.name}"}
    name, options = given.asked_for
    own = {k: str(value) if k == "root" else value for k, value in options.items()}
    made_by = signature(make_federation).parameters
    return {"federation": name, "data": {k: v for k, v in data.items() if k not in made_by} | own}


def own_loss(loss: Callable[..., Tensor]) -> str:
    """How a recipe names a custom loss: custom:NAME@CODE."""
    refuse_class("loss", loss)
    return f"custom:{getattr(loss, '__name__', type(loss).__name__)}@{code_hash(loss)}"


def own_name(thing: object) -> str:
    """How a recipe names a function or class of the user's: custom:NAME@CODE."""
    return f"{CUSTOM}{name_of(thing)}@{code_hash(thing)}"


def training_keys(
    optimizer: str | MakeOptimizer | None, schedule: str | Schedule | None, epochs: Epochs | None
) -> dict[str, Any]:
    """How a recipe records an optimizer, a schedule and epochs that were given.

    >>> training_keys("adam", None, {"north": 5})
    {'optimizer': 'adam', 'client_epochs': {'north': 5}}
    >>> training_keys(torch.optim.RMSprop, None, 2)["optimizer"].partition("@")[0]
    'custom:RMSprop'
    """
    keys: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"optimizer= must be a name, a class or a function, got an object. Write optimizer={name_of(optimizer)}: "
            "every client makes its own in each round."
        )
    for key, given in (("optimizer", optimizer), ("schedule", schedule)):
        if given is not None:
            keys[key] = own_name(given) if callable(given) else given
    if isinstance(epochs, Mapping):
        keys["client_epochs"] = dict(epochs)
    elif epochs is not None:
        keys |= {"client_epochs": None} | ({} if callable(epochs) else {"epochs": epochs})
    return keys


def custom_name(text: str) -> str:
    """The bare name of a custom object.

    >>> custom_name("custom:Net@12ab.34cd")
    'Net'
    """
    return text.removeprefix("custom:").partition("@")[0]


def same_code(text: str, other: str) -> bool:
    """Whether two names of custom objects have the same code; their first weights may differ.

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
    """What a thing does, piece by piece; `seen` holds functions and classes that were visited already."""
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
        anonymous = thing.__name__ == "<lambda>"  # its source is the whole line that it is on
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
    """The function in a static method, class method or property; any other value as it is."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _functions(kind: type) -> Iterator[FunctionType]:
    for inner in map(_unwrapped, vars(kind).values()):
        if inspect.isfunction(inner) and inner.__module__ == kind.__module__:  # not what a decorator put there
            yield inner


def _reached(function: FunctionType, seen: set[int]) -> Iterator[bytes]:
    """What a function in the user's own files reaches by the names it uses."""
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, type) or inspect.isfunction(value):
            if of_user(value.__module__):
                yield name.encode()
                yield from _code(value, seen)
        elif value is not None and isinstance(value, _CONSTANT):
            yield name.encode()
            yield from _value(value, seen)


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _closed_over(function: FunctionType) -> list[object]:
    found: list[object] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the name has no value yet
            found.append(cell.cell_contents)
    return found


def _source(thing: object) -> list[bytes]:
    try:
        return [inspect.getsource(thing).encode()]  # type: ignore[arg-type]
    except (OSError, TypeError):  # typed into a prompt, or generated
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
    """What identifies a value, without addresses in memory."""
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
