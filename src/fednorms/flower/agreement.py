"""What sites and the server must know of each other: a site's card, and what all agree on. No image leaves a site."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fednorms.data import Federation, Preprocessing, Protocol
from fednorms.runs.facts import Facts, SiteFacts


@dataclass(frozen=True)
class Card:
    """What a site says of itself when it joins: its name, what its images are, and how many it has.

    `counts` (training images per class) are sent only where the recipe balances the classes.
    """

    site: str
    domain: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    preprocessing: Preprocessing
    train: int
    val: int
    test: int
    counts: tuple[int, ...] = ()
    order: int = 0
    protocol: Protocol = field(default_factory=Protocol)

    @classmethod
    def of(cls, federation: Federation, *, counts: bool, order: int) -> Card:
        """The card of a federation that consists of one site."""
        site = federation.sites[0]
        split = next(iter(site.splits.values()))
        sizes = {part: len(data) for part, data in site.splits.items()}
        return cls(
            site=site.name,
            domain=site.domain,
            classes=tuple(federation.classes),
            shape=federation.shape,
            dtype=str(split.x.dtype).removeprefix("torch."),
            preprocessing=federation.preprocessing,
            train=sizes.get("train", 0),
            val=sizes.get("val", 0),
            test=sizes.get("test", 0),
            counts=tuple(site.counts(federation.num_classes).get("train", [])) if counts else (),
            order=order,
            protocol=federation.protocol,
        )

    def to_json(self) -> str:
        """As text, for a message."""
        return _text(self)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """The inverse of `to_json`."""
        return cls(**_values(text))

    def differs(self, other: Card) -> str:
        """In what two sites' data do not fit together; empty if they do."""
        for what, ours, theirs in (
            ("classes", list(self.classes), list(other.classes)),
            ("images", "x".join(map(str, self.shape)), "x".join(map(str, other.shape))),
            ("pixels", self.dtype, other.dtype),
            ("preprocessing", self.preprocessing.to_dict(), other.preprocessing.to_dict()),
            ("protocol's choices", self.protocol.to_dict(), other.protocol.to_dict()),
        ):
            if ours != theirs:
                return f'its {what} are {ours}, those of "{other.site}" {theirs}'
        return ""


@dataclass(frozen=True)
class Agreement:
    """What every site is told of the others: how many there are, and how many images they have in all."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    dtype: str
    preprocessing: Preprocessing
    clients: int
    samples: int
    counts: tuple[int, ...] = ()
    protocol: Protocol = field(default_factory=Protocol)

    @classmethod
    def of(cls, cards: Iterable[Card], clients: int) -> Agreement:
        """The agreement of the sites that have joined; `clients` counts those that may still come, too."""
        known = list(cards)
        first = known[0]
        channels, height, width = first.shape
        return cls(
            classes=first.classes,
            shape=(channels, height, width),
            dtype=first.dtype,
            preprocessing=first.preprocessing,
            clients=clients,
            samples=sum(card.train for card in known),
            counts=tuple(sum(row) for row in zip(*(card.counts for card in known if card.counts), strict=True)),
            protocol=first.protocol,
        )

    def facts(self, sites: Iterable[SiteFacts] = ()) -> Facts:
        """The federation's facts, from which the task is made; by default without any single site."""
        images = {"train": list(self.counts)} if self.counts else {}
        named = tuple(sites)
        return Facts(
            name="flower",
            classes=self.classes,
            shape=self.shape,
            dtype=self.dtype,
            preprocessing=self.preprocessing,
            sites=named or (SiteFacts("all sites", "all sites", images=images),),
            clients=tuple(s.name for s in named) or tuple(str(i) for i in range(self.clients)),
            samples=self.samples,
            protocol=self.protocol,
        )

    def to_json(self) -> str:
        """As text, for a message."""
        return _text(self)

    @classmethod
    def from_json(cls, text: str) -> Agreement:
        """The inverse of `to_json`."""
        return cls(**_values(text))


def _text(values: Card | Agreement) -> str:
    plain = {"preprocessing": values.preprocessing.to_dict(), "protocol": values.protocol.to_dict()}
    return json.dumps({**vars(values), **plain})


def _values(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    lists: dict[str, Any] = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    made = {
        "preprocessing": Preprocessing.from_dict(values["preprocessing"]),
        "protocol": Protocol.from_dict(values.get("protocol", {})),
    }
    return values | lists | made
