"""What sites and the server tell each other about the data: a site's card, and what all sites agree on.

No image leaves a site. Both texts are JSON in a message's `about` record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fednorms.core.errors import BadInput, RunFailed
from fednorms.data import Federation
from fednorms.data.facts import ACROSS_MACHINES, Facts
from fednorms.data.sizes import Size, sides
from fednorms.flower import schema
from fednorms.runs.store.directory import RunDirectory


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
    def from_json(cls, text: object) -> Card:
        """The inverse of `to_json`; raises `schema.BadMessage` for anything that is not a card."""
        said = schema.read_text(schema.CardText, text)
        facts = _one_site(said.model_dump(), said.site, said.domain, said.train, said.counts)
        return cls(facts, {"train": said.train, "val": said.val, "test": said.test}, said.order)

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


def majority(cards: Mapping[str, Card], classes: Sequence[str] = (), size: Size | None = None) -> list[Card]:
    """The card whose data most sites have: it decides what fits, whoever was first and whatever the names.

    A tie is decided by `classes` and `size`, those that the project names. If it stays a tie, there is one card for
    each opinion, sorted by name, and nobody knows which one is right.
    """
    forms: dict[str, list[str]] = {}
    for name, card in sorted(cards.items()):
        forms.setdefault(json.dumps(_shared(card.facts.to_dict()), sort_keys=True), []).append(name)

    def rank(names: list[str]) -> tuple[int, bool, bool]:
        facts = cards[names[0]].facts
        named = bool(classes) and list(facts.classes) == list(classes)
        return len(names), named, size is not None and facts.shape[1:] == sides(size)

    best = max(map(rank, forms.values()), default=None)
    return [cards[names[0]] for names in forms.values() if rank(names) == best]


def capped(cards: Mapping[str, Card], most: float) -> dict[str, int]:
    """The training images that each site counts for: its own, up to a number that is the same for all.

    It is the largest number with which fewer than half of the sites (or one of two) never count for more than the share
    `most` of all images, whatever they claim.

    >>> from types import SimpleNamespace as Some
    >>> cards = {n: Some(facts=Some(samples=k)) for n, k in {"a": 10**6, "b": 60, "c": 40}.items()}
    >>> capped(cards, 0.9), capped(cards, 1.0)["a"]
    ({'a': 900, 'b': 60, 'c': 40}, 1000000)
    """
    sizes = {name: card.facts.samples for name, card in cards.items()}
    limit = _largest(sorted(sizes.values(), reverse=True), most)
    return {name: min(n, limit) for name, n in sizes.items()}


def _largest(sizes: Sequence[int], most: float) -> int:
    """The number of `capped`, of sizes from the largest to the smallest."""
    few = max(1, (len(sizes) - 1) // 2)
    if most >= 1 or len(sizes) < 2 or sum(sizes[:few]) <= most * sum(sizes):
        return max(sizes, default=1)
    for cut in range(1, len(sizes)):  # if it cuts the first ones: few * limit = most * (cut * limit + rest), or so
        own, slope = sum(sizes[cut:few]), min(cut, few) - most * cut
        limit = (most * sum(sizes[cut:]) - own) / slope if slope > 0 else 0.0
        if limit >= sizes[cut]:
            return max(1, round(limit))
    return max(1, sizes[-1])


def agreement(facts: Facts) -> str:
    """What every site is told about all of them, as text: only sums, and nothing about another single site."""
    shared = _shared(facts.to_dict())
    protocol = shared.pop("protocol")
    sums = {"clients": len(facts.clients), "samples": facts.samples, "counts": facts.class_counts}
    return json.dumps({**shared, **sums, "protocol": protocol})


def read_agreement(text: object) -> Facts:
    """The facts in what `agreement` wrote: all sites appear as one."""
    said = schema.read_text(schema.AgreementText, text)
    everybody = _one_site(said.model_dump(), "all sites", "all sites", said.samples, said.counts)
    return replace(everybody, name=ACROSS_MACHINES, clients=tuple(map(str, range(said.clients))))


_SHARED = ("classes", "shape", "dtype", "preprocessing", "protocol")


def _shared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a federation's facts, as plain values, that all sites have in common."""
    return {key: facts[key] for key in _SHARED if key in facts}


def _one_site(shared: Mapping[str, Any], name: str, domain: str, train: int, counts: Sequence[int]) -> Facts:
    """The facts of a federation of one site; raises `schema.BadMessage` if the values do not describe one."""
    site = {"name": name, "domain": domain, "images": {"train": list(counts)} if counts else {}}
    try:
        return Facts.from_dict(_shared(shared) | {"name": name, "sites": [site], "clients": [name], "samples": train})
    except BadInput as error:
        raise schema.BadMessage(schema.problem(error)) from None


def known_facts(directory: RunDirectory) -> Facts | None:
    """What the sites of a deployed run agreed on when it started; None before that."""
    try:
        return directory.read_facts()
    except RunFailed as error:
        raise RunFailed(
            f"Cannot read {directory.facts_path} ({error.__cause__}). It names the sites of this run and describes "
            "their data. Restore it from a copy; or remove it, and continue the run with `flwr run` when all its sites "
            "are connected: the server writes it again."
        ) from None
