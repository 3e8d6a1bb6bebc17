"""The data of a tournament: the sites that train, with validation images and without test images."""

from __future__ import annotations

from dataclasses import replace

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.data import Federation
from fednorms.data.splits import split
from fednorms.runs.option_names import option

SHARE = 0.2  # of the training images, held out where there is no validation split
LEAST = 10  # validation images without which nothing can be compared


def for_validation(federation: Federation, seed: int = 0) -> tuple[Federation, list[str]]:
    """The federation without its test images, with validation images held out of training if there are none.

    Also returns notes for the user. Test images are not read.
    """
    what = f'Federation "{federation.name}"'
    if federation.num_classes < 2:
        raise BadInput(f"{what} has only one class, so every method is always right. There is nothing to choose.")
    sites = [replace(site, test=None) for site in federation.clients]
    notes = []
    if not any(site.val is not None for site in sites):
        held = []
        for site in sites:
            assert site.train is not None
            rows = split(site.train.y, {"val": SHARE}, seed, site.name, site.train.groups)
            held.append(replace(site, train=site.train.subset(rows["train"]), val=site.train.subset(rows["val"])))
        sites = held
        grouped = all(site.train is not None and site.train.groups is not None for site in federation.clients)
        notes.append(
            f"There is no validation split: {100 * SHARE:.0f} % of each site's training images were held out for the "
            "search. "
            + (
                "Groups were kept together."
                if grouped
                else f"If several images show one patient, keep them together ({option('group')})."
            )
        )
    images = sum(len(site.val) for site in sites if site.val is not None)
    if images < LEAST:
        train = sum(len(site.train) for site in federation.clients if site.train is not None)
        raise BadInput(
            f"{what} has {counted(train, 'training image')}, which leaves {images} for validation. Comparing methods "
            f"needs at least {LEAST}: add images, or hold out more for validation ({option('val')})."
        )
    return replace(federation, sites=sites), notes + _missing_classes(federation)


def _missing_classes(federation: Federation) -> list[str]:
    lacking: dict[str, list[str]] = {}
    for site in federation.clients:  # `Site.counts` would look at test labels as well
        assert site.train is not None
        present = set(site.train.y.tolist())
        lacking[site.name] = [name for c, name in enumerate(federation.classes) if c not in present]
    some = {site: classes for site, classes in lacking.items() if classes}
    if not some:
        return []
    shown = "; ".join(f"{site} lacks {', '.join(classes[:3])}" for site, classes in list(some.items())[:3])
    more = f"; and {len(some) - 3} more sites" if len(some) > 3 else ""
    return [f"Classes are missing at {counted(len(some), 'site')}: {shown}{more}."]
