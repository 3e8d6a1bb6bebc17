"""fednorms: federated learning when clients differ.

>>> import fednorms as fn
>>> result = fn.run("fedbn", "digits-shift", model="cnn-small", rounds=2)
>>> result.rounds
2
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednorms.public import *  # noqa: F403


_ALSO_MODULES = ("describe", "method", "part")  # functions in modules of the same name


class _Package(ModuleType):
    """Loads `fednorms.public`, and with it torch, at first use, so that the command line starts at once."""

    def __getattr__(self, name: str) -> object:
        special = name.startswith("__") and name not in ("__all__", "__version__")
        if not special and (name in _ALSO_MODULES or find_spec(f"fednorms.{name}") is None):
            public = import_module("fednorms.public")
            if name in public.__all__ or name == "__all__":
                return getattr(public, name)
        raise AttributeError(f"module 'fednorms' has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        # `import fednorms.method` must not hide the function `fednorms.method` behind the module of that name.
        if not (isinstance(value, ModuleType) and name in _ALSO_MODULES):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *import_module("fednorms.public").__all__})


sys.modules[__name__].__class__ = _Package
