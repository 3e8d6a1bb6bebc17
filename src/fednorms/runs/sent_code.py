"""Code of the user for worker processes: what was defined in a notebook or at a prompt is sent as it is.

A new process finds a class or function by importing its module. A notebook (`__main__` without a file) cannot be
imported, nor can anything inside a function. cloudpickle sends such code itself.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.optim import name_of
from fednorms.core.part import REGISTRY, Part
from fednorms.methods.registry import method
from fednorms.runs.identity import Custom, own_parts, remember_code


def packed(custom: Custom, methods: Iterable[str]) -> bytes:
    """Custom objects (without the federation) and custom parts of these methods, to be unpacked in a new process."""
    parts: dict[str, tuple[type[Part], str]] = {}
    for chosen in map(method, methods):
        codes = own_parts(chosen)
        parts |= {p.name: (type(p), codes[p.name]) for p in chosen.parts if p.name in codes}
    typed = [f'part "{name}"' for name, (cls, _) in parts.items() if _unimportable(cls)]
    named = {"model": custom.model, "loss": custom.loss, **vars(custom.training)}
    typed += [
        f'{what} "{name_of(thing)}"' for what, thing in named.items() if thing is not None and _unimportable(thing)
    ]
    dumps = _dumps(typed) if typed else pickle.dumps
    try:
        return dumps((replace(custom, federation=None), parts))
    except Exception as error:  # pickle raises many types
        raise BadInput(
            f"Custom code cannot be sent to worker processes: {error}. Use jobs=1, or define it at the top of a module."
        ) from None


def unpack(sent: bytes) -> Custom:
    """The custom objects; parts are registered under their names, with the hashes of their code."""
    custom, parts = pickle.loads(sent)
    for name, (cls, code) in parts.items():
        REGISTRY[name] = cls
        remember_code(cls, code)
    return custom


def _dumps(typed: list[str]) -> Callable[[Any], bytes]:
    try:
        import cloudpickle
    except ImportError:
        raise BadInput(
            f"Worker processes cannot import {' and '.join(typed)}, defined in a notebook, at a prompt or inside a "
            "function. Install cloudpickle (pip install cloudpickle), use jobs=1, or move the code into a module."
        ) from None
    return cloudpickle.dumps


def _unimportable(thing: object) -> bool:
    """Whether a new process could not import the code of a class, function or object (of a model: of all layers)."""
    if isinstance(thing, nn.Module):
        return any(_unimportable(type(layer)) for layer in thing.modules())
    thing = thing.func if isinstance(thing, partial) else thing
    code = thing if hasattr(thing, "__qualname__") else type(thing)
    if getattr(code, "__module__", "") in ("__main__", "__mp_main__"):
        return getattr(sys.modules["__main__"], "__file__", None) is None or not _at_top(code)
    return not _at_top(code)


def _at_top(code: object) -> bool:
    return "<" not in getattr(code, "__qualname__", "")  # <locals>, <lambda>
