"""Every published method, one idea per file: `fn.methods.FedProx(mu=0.1)` is a part, and parts add up with `+`.

A file in this folder is found by itself and registers its parts; it uses only `core`, `layers` and `transforms`.
`registry` reads methods from text.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from fednorms.core.part import REGISTRY, Part

for _found in pkgutil.iter_modules(__path__):
    if _found.name != "registry":
        import_module(f"fednorms.methods.{_found.name}")

_PARTS = {cls.__name__: cls for cls in REGISTRY.values() if cls.__module__.startswith("fednorms.methods.")}
_RENAMED = {"Centralised": "Centralized", "FedEXP": "FedExP", "WeightStandardisation": "WeightStandardization"}
globals().update(_PARTS)
globals().update({old: _PARTS[new] for old, new in _RENAMED.items()})  # names of version 0.1
__all__ = sorted(_PARTS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Part]: ...
