"""Changes that fit every federation: fewer images, no copies, validation data, and another normalization."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from fednorms.core.errors import BadInput
from fednorms.core.option_names import option, setting
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.duplicates import without_copies
from fednorms.data.federation import Federation, Site, with_splits
from fednorms.data.folders.divide import Copies
from fednorms.data.splits import split


def changed(
    federation: Federation, copies: str | None, subset: float | None, normalize: str | None, seed: int
) -> Federation:
    """A federation after the changes that were asked for."""
    if copies is not None and copies not in get_args(Copies):
        raise BadInput(f'{option("copies").rstrip("=")} must be keep, drop or together, got "{copies}".')
    if copies == "together" and "group" not in federation.source:  # from_folders has done it
        raise BadInput(
            f'Federation "{federation.name}" has its own split, which cannot keep copies together. '
            f"{setting('copies', 'drop')} leaves copies out."
        )
    if copies == "drop":
        federation = without_copies(federation)
    if subset is not None:
        federation = subset_of(federation, subset, seed)
    if normalize is not None:
        chosen = Preprocessing.read(normalize, federation.stored_shape[0])
        chosen = replace(chosen, crop=federation.preprocessing.crop)
        federation = replace(federation, preprocessing=chosen)
    return federation


def subset_of(federation: Federation, fraction: float, seed: int = 0) -> Federation:
    """Keep a fraction of every split of every site: stratified, with at least one image of every class that is there.

    A smaller fraction keeps a part of what a larger one keeps, to within rounding.

    >>> from fednorms.data.registry import federation
    >>> [len(site.train) for site in subset_of(federation("digits-shift"), 0.1).clients]
    [25, 25, 25, 25, 25]
    """
    if not 0 < fraction <= 1:
        raise BadInput(f"{option('subset').rstrip('=')} must be a fraction above 0 and up to 1, got {fraction}.")
    if fraction == 1:
        return federation
    sites = []
    for site in federation.sites:
        kept = {}
        for part, images in site.splits.items():
            name = f"{site.name} {part} subset"
            kept[part] = images.subset(split(images.y, {"train": fraction, "rest": 1 - fraction}, seed, name)["train"])
        sites.append(with_splits(site, kept))
    note = f"only {100 * fraction:g} % of the images are used"
    return replace(federation, sites=sites, source=_noted(federation, note) | {"subset": fraction})


def with_validation(federation: Federation, val: float, seed: int = 0) -> Federation:
    """Set a fraction of each client's training images aside for validation, where a protocol has none.

    >>> from fednorms.data.registry import federation
    >>> from fednorms.data import from_arrays
    >>> import numpy as np
    >>> plain = from_arrays({"a": {"train": (np.zeros((20, 2, 2), np.uint8), [0, 1] * 10)}})
    >>> with_validation(plain, 0.1).site("a")
    Site('a', domain='a', train=18, val=2)
    """
    if not 0 <= val < 1:
        raise BadInput(f"{option('val').rstrip('=')} must be a fraction from 0 to below 1, got {val}.")
    if any(site.val is not None for site in federation.sites):
        raise BadInput(
            f'Federation "{federation.name}" has validation images of its own under this protocol, so '
            f"{option('val').rstrip('=')} cannot be given."
        )
    if not val:
        return federation

    def divided(site: Site) -> Site:
        if site.train is None:
            return site
        parts = split(site.train.y, {"val": val}, seed, f"{site.name} val", site.train.groups)
        return replace(site, train=site.train.subset(parts["train"]), val=site.train.subset(parts["val"]))

    note = f"{100 * val:g} % of each site's training images are for validation, which is not the protocol's"
    return replace(federation, sites=[divided(site) for site in federation.sites], source=_noted(federation, note))


def _noted(federation: Federation, note: str) -> dict[str, object]:
    return {**federation.source, "notes": [*federation.source.get("notes", []), note]}
