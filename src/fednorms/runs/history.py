"""How recipes of older versions are read: a default that has changed since is written out as what it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fednorms.core.part import Part
from fednorms.methods.fednova import FedNova
from fednorms.methods.registry import method
from fednorms.methods.scaffold import Scaffold


def as_then_meant(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe's values with the method as the version that wrote them understood it.

    Until 0.1, scaffold's control was "gradient", and fednova did not know of a fedprox in the same method.

    >>> as_then_meant({"version": "0.1.0", "method": "scaffold + fedbn"})["method"]
    "scaffold(control='gradient') + fedbn"
    >>> as_then_meant({"method": "scaffold"}), as_then_meant({"version": "0.2.0", "method": "scaffold"})["method"]
    ({'method': 'scaffold'}, 'scaffold')
    """
    version, text = values.get("version"), values.get("method")
    if not (isinstance(version, str) and version.startswith("0.1.") and isinstance(text, str)):
        return values
    parts = method(text).parts
    pulled = any(p.proximal for p in parts)

    def then(p: Part) -> Part:
        if isinstance(p, Scaffold) and (p.control, p.variant, p.option) == ("auto", "paper", "II"):
            return replace(p, control="gradient")
        return replace(p, mu=0.0) if isinstance(p, FedNova) and p.mu is None and pulled else p

    return values | {"method": " + ".join(str(then(p)) for p in parts) or "fedavg"}
