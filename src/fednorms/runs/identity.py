"""What a user brings along, told apart: code of parts and losses, code and tensors of a model, as short hashes."""

from __future__ import annotations

import hashlib
import inspect
from types import CodeType

import torch
from torch import nn

from fednorms.method import Method

_HERE = "fednorms."  # code of the library is named by its version
_KNOWN = ("builtins", "abc", "typing", "torch")


def code_hash(thing: object) -> str:
    """A hash of the source of a function or class, with the classes that it builds on; of its bytecode without one.

    >>> code_hash(lambda x: x + 1) == code_hash(lambda x: x + 2)
    False
    """
    found = hashlib.sha256()
    for part in _pieces(thing):
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:12]


def model_hash(model: nn.Module) -> str:
    """A hash of a model's tensors, its layers and the code of those that are not torch's.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> model_hash(a) == model_hash(b), model_hash(a) == model_hash(a)
    (False, True)
    """
    found = hashlib.sha256(repr(model).encode())
    for kind in dict.fromkeys(type(m) for m in model.modules()):
        if not kind.__module__.startswith(("torch.", "torchvision.", "timm.", _HERE)):
            found.update(code_hash(kind).encode())
    for name, tensor in model.state_dict().items():
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()[:12]


def own_parts(method: Method) -> dict[str, str]:
    """The parts of a method that do not come with the library, each with a hash of its code.

    >>> from fednorms.method import method
    >>> own_parts(method("fedbn + fedfn"))
    {}
    """
    return {p.name: code_hash(type(p)) for p in method.parts if not type(p).__module__.startswith(_HERE)}


def own_model(model: nn.Module) -> str:
    """How a recipe names a model that was handed over: custom:CLASS@HASH."""
    return f"custom:{type(model).__name__}@{model_hash(model)}"


def own_loss(loss: object) -> str:
    """How a recipe names a loss that was handed over."""
    code = loss if inspect.isfunction(loss) else type(loss)
    return f"custom:{getattr(loss, '__name__', type(loss).__name__)}@{code_hash(code)}"


def named(text: str) -> str:
    """The name alone of something of the user's own.

    >>> named("custom:Net@12ab")
    'Net'
    """
    return text.removeprefix("custom:").partition("@")[0]


def _pieces(thing: object) -> list[str]:
    if isinstance(thing, type):
        own = [k for k in thing.__mro__ if not k.__module__.startswith((_HERE, *_KNOWN))]
        return [piece for kind in own for piece in _source(kind)]
    return _source(thing)


def _source(thing: object) -> list[str]:
    anonymous = getattr(thing, "__name__", "") == "<lambda>"  # its source is the line on which it stands
    try:
        source = [inspect.getsource(thing)]  # type: ignore[arg-type]
    except (OSError, TypeError):
        source = []
    return source if source and not anonymous else source + _bytecode(thing)


def _bytecode(thing: object) -> list[str]:
    if isinstance(thing, type):
        return [piece for value in vars(thing).values() for piece in _bytecode(value)]
    code = thing if isinstance(thing, CodeType) else getattr(thing, "__code__", None)
    if code is None:
        return []
    constants = [piece for c in code.co_consts for piece in (_bytecode(c) if isinstance(c, CodeType) else [repr(c)])]
    return [code.co_code.hex(), repr(code.co_names), *constants]
