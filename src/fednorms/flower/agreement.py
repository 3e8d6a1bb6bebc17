"""What sites and the server tell each other about the data: a site's card, and what all sites agree on.

No image leaves a site. Both texts are JSON in a message's `about` record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fednorms.data import Federation
from fednorms.data.facts import Facts


@dataclass(frozen=True)
class Card:
    """What a site says about itself when it joins: the facts of its data, and the number of images per split.

    The facts hold training images per class only if the recipe balances the classes. `order` sorts sites that the
    deployment does not name.
    """

    facts: Facts
    sizes: Mapping[str, int]
    order: int = 0

    @classmethod
    def of(cls, federation: Federation, *, counts: bool, order: int) -> Card:
        """The card of a federation that consists of one site."""
        whole = Facts.of(federation)
        site = whole.sites[0]
        per_class = whole.class_counts if counts else []
        sizes = {part: sum(site.images.get(part, [])) for part in ("train", "val", "test")}
        return cls(_one_site(whole.to_dict(), site.name, site.domain, sizes["train"], per_class), sizes, order)

    @property
    def site(self) -> str:
        """The site's name."""
        return self.facts.sites[0].name

    def to_json(self) -> str:
        """As text, for a message."""
        shared = _shared(self.facts.to_dict())
        protocol = shared.pop("protocol")
        who = {"site": self.site, "domain": self.facts.sites[0].domain}
        last = {"counts": self.facts.class_counts, "order": self.order, "protocol": protocol}
        return json.dumps({**who, **shared, **self.sizes, **last})

    @classmethod
    def from_json(cls, text: str) -> Card:
        """The inverse of `to_json`."""
        values = json.loads(text)
        facts = _one_site(values, values["site"], values["domain"], values["train"], values["counts"])
        return cls(facts, {part: values[part] for part in ("train", "val", "test")}, values["order"])

    def differs(self, other: Card) -> str:
        """How the data of two sites do not fit together; empty if they do."""
        ours, theirs = self.facts, other.facts
        for what, mine, yours in (
            ("classes", list(ours.classes), list(theirs.classes)),
            ("images", "x".join(map(str, ours.shape)), "x".join(map(str, theirs.shape))),
            ("pixels", ours.dtype, theirs.dtype),
            ("preprocessing", ours.preprocessing.to_dict(), theirs.preprocessing.to_dict()),
            ("protocol", ours.protocol.to_dict(), theirs.protocol.to_dict()),
        ):
            if mine != yours:
                return f'{what}: {mine}, but "{other.site}" has {yours}'
        return ""


def agreement(facts: Facts) -> str:
    """What every site is told about all of them, as text: only sums, and nothing about another single site."""
    shared = _shared(facts.to_dict())
    protocol = shared.pop("protocol")
    sums = {"clients": len(facts.clients), "samples": facts.samples, "counts": facts.class_counts}
    return json.dumps({**shared, **sums, "protocol": protocol})


def read_agreement(text: str) -> Facts:
    """The facts in what `agreement` wrote: all sites appear as one."""
    values = json.loads(text)
    everybody = _one_site(values, "all sites", "all sites", values["samples"], values["counts"])
    return replace(everybody, name="flower", clients=tuple(map(str, range(values["clients"]))))


_SHARED = ("classes", "shape", "dtype", "preprocessing", "protocol")


def _shared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a federation's facts, as plain values, that all sites have in common."""
    return {key: facts[key] for key in _SHARED if key in facts}


def _one_site(shared: Mapping[str, Any], name: str, domain: str, train: int, counts: list[int]) -> Facts:
    site = {"name": name, "domain": domain, "images": {"train": counts} if counts else {}}
    return Facts.from_dict(_shared(shared) | {"name": name, "sites": [site], "clients": [name], "samples": train})
