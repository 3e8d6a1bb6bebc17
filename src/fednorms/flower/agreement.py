"""What sites and the server tell each other about the data: a site's card, and what all sites agree on.

No image leaves a site. Both texts are JSON in a message's `about` record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fednorms.data import Federation, Preprocessing, Protocol
from fednorms.data.facts import Facts, SiteFacts


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
        whole, site = Facts.of(federation), federation.sites[0]
        per_class = whole.class_counts if counts else []
        sizes = {part: len(site.splits.get(part, ())) for part in ("train", "val", "test")}
        return cls(_one_site(vars(whole), site.name, site.domain, sizes["train"], per_class), sizes, order)

    @property
    def site(self) -> str:
        """The site's name."""
        return self.facts.sites[0].name

    def to_json(self) -> str:
        """As text, for a message."""
        shared = _shared(self.facts)
        protocol = shared.pop("protocol")
        who = {"site": self.site, "domain": self.facts.sites[0].domain}
        last = {"counts": self.facts.class_counts, "order": self.order, "protocol": protocol}
        return json.dumps({**who, **shared, **self.sizes, **last})

    @classmethod
    def from_json(cls, text: str) -> Card:
        """The inverse of `to_json`."""
        values = json.loads(text)
        facts = _one_site(_read(values), values["site"], values["domain"], values["train"], values["counts"])
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
    shared = _shared(facts)
    protocol = shared.pop("protocol")
    sums = {"clients": len(facts.clients), "samples": facts.samples, "counts": facts.class_counts}
    return json.dumps({**shared, **sums, "protocol": protocol})


def read_agreement(text: str) -> Facts:
    """The facts in what `agreement` wrote: all sites appear as one."""
    values = json.loads(text)
    images = {"train": list(values["counts"])} if values["counts"] else {}
    return Facts(
        **_read(values),
        name="flower",
        sites=(SiteFacts("all sites", "all sites", images=images),),
        clients=tuple(str(i) for i in range(values["clients"])),
        samples=values["samples"],
    )


_SHARED = ("classes", "shape", "dtype", "preprocessing", "protocol")


def _one_site(shared: Mapping[str, Any], name: str, domain: str, train: int, counts: list[int]) -> Facts:
    site = SiteFacts(name, domain, images={"train": list(counts)} if counts else {})
    return Facts(**{k: shared[k] for k in _SHARED}, name=name, sites=(site,), clients=(name,), samples=train)


def _shared(facts: Facts) -> dict[str, Any]:
    whole = facts.to_dict()
    return {key: whole[key] for key in _SHARED}


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    channels, height, width = values["shape"]
    return {
        "classes": tuple(values["classes"]),
        "shape": (channels, height, width),
        "dtype": values["dtype"],
        "preprocessing": Preprocessing.from_dict(values["preprocessing"]),
        "protocol": Protocol.from_dict(values.get("protocol", {})),
    }
