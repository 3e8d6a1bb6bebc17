"""Federations: named sites with images and labels, made from arrays, datasets, folders, or embedded.

`fednorms.federation(name)` opens one by name. Here, `fednorms.data.federation` is the module of the class `Federation`;
the function is `fednorms.data.registry.federation`.
"""

from __future__ import annotations

from fednorms.core.preprocessing import Preprocessing
from fednorms.data.arrays import from_arrays, from_datasets
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.folders import from_folders, site_from_folder
from fednorms.data.mapped import MappedImages
from fednorms.data.on_demand import OnDemand
from fednorms.data.protocol import Protocol
from fednorms.data.registry import federations
from fednorms.data.splits import split

__all__ = [
    "Federation",
    "MappedImages",
    "OnDemand",
    "Preprocessing",
    "Protocol",
    "Site",
    "Split",
    "federations",
    "from_arrays",
    "from_datasets",
    "from_folders",
    "site_from_folder",
    "split",
]
