"""Which methods can run across machines, and why the others cannot."""

from __future__ import annotations

import torch

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.part import PROXY, overrides
from fednorms.data import Federation, Site, Split
from fednorms.engines.base import PROVIDES


def obstacle(method: Method) -> str:
    """Why a method cannot be deployed; empty if it can.

    >>> from fednorms.methods.registry import method
    >>> obstacle(method("scaffold + fedbn"))
    ''
    >>> obstacle(method("centralised"))
    'centralised moves the data of all sites into one place'
    """
    if pooling := pools(method):
        return f"{pooling} moves the data of all sites into one place"
    for p in method.parts:
        if "joint" in p.requires:
            return f"{p.name} takes steps that all sites compute together, layer by layer"
        if PROXY in p.requires:
            return f"{p.name} learns from images at the server, and no image leaves a site across machines"
        if lacking := sorted(p.requires - PROVIDES["flower"]):
            return f"{p.name} needs {' and '.join(lacking)}"
    return ""


def pools(method: Method) -> str:
    """The name of the part that pools the data of all sites; empty if there is none.

    >>> from fednorms.methods.registry import method
    >>> pools(method("centralised")), pools(method("fedbn"))
    ('centralised', '')
    """
    moving = (p.name for p in method.parts if overrides(p, "arrange") and len(p.arrange(_two_sites()).clients) < 2)
    return next(moving, "")


def _two_sites() -> Federation:
    data = Split(torch.zeros(2, 3, 2, 2), torch.zeros(2, dtype=torch.int64))
    return Federation("two", [Site(n, n, data, attributes={"modality": n}) for n in "ab"], ["one"])


def refuse_obstacles(method: Method) -> None:
    """Raise BadInput for a method that cannot be deployed, naming the engine that can run it."""
    if reason := obstacle(method):
        raise BadInput(
            f'Method "{method}" cannot run across machines: {reason}. '
            'Run it where all data are in one place, with `fednorms run` and engine="loop".'
        )
