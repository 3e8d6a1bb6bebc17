"""A federation without its data: all that is needed to assemble a task or to use a trained model elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.on_demand import Numbered, OnDemand
from fednorms.data.protocol import Protocol

if TYPE_CHECKING:
    from fednorms.data.federation import Federation

ACROSS_MACHINES = "flower"  # the federation of a run across machines


@dataclass(frozen=True)
class SiteFacts:
    """A site without its data; `images` counts its images per split and class."""

    name: str
    domain: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of training images.

        >>> SiteFacts("a", "a", images={"train": [3, 4]}).samples
        7
        """
        return sum(self.images.get("train", []))


@dataclass(frozen=True)
class Facts:
    """A federation without its data: classes, shape, preprocessing and sites; `clients` are those that train.

    If clients are made on demand, `sites` are only those that are tested.
    A run stores them as federation.json. Flower's sites send their own to the server, which merges them.

    >>> facts = Facts("f", ("cat", "dog"), (3, 8, 8), "uint8", Preprocessing(), (SiteFacts("a", "a"),), ("a",), 7)
    >>> Facts.from_dict(facts.to_dict()) == facts
    True
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    dtype: str
    preprocessing: Preprocessing
    sites: tuple[SiteFacts, ...]
    clients: Sequence[str]
    samples: int
    stored: tuple[int, int, int] | None = None  # shape before the center crop, if there is one
    prepared: str = ""  # what a data set's reader does to images besides resizing them
    protocol: Protocol = field(default_factory=Protocol)
    partition: Mapping[str, Any] = field(default_factory=dict)  # rule, seed and hash, if the data were partitioned
    left_out: tuple[str, ...] = ()  # files that could not be read, and why

    @classmethod
    def of(cls, federation: Federation, training: Federation | None = None) -> Facts:
        """Describe a federation; `training` is the one that a method arranged for training, if that differs.

        >>> from fednorms.data.registry import federation
        >>> facts = Facts.of(federation("digits-shift"))
        >>> facts.clients, facts.dtype
        (('clean', 'faint', 'foggy', 'negative', 'poster'), 'uint8')
        """
        clients = (federation if training is None else training).clients
        if isinstance(clients, OnDemand):
            names: Sequence[str] = clients.names
            samples = clients.samples
        else:
            names = tuple(site.name for site in clients)
            samples = sum(len(site.train) for site in clients if site.train is not None)
        sites = federation.scored if isinstance(federation.sites, OnDemand) else federation.sites
        first = next(split for site in federation.sites for split in site.splits.values())
        shape, stored = federation.shape, federation.stored_shape
        return cls(
            name=federation.name,
            classes=tuple(federation.classes),
            shape=shape,
            dtype=str(first.x.dtype).removeprefix("torch."),
            preprocessing=federation.preprocessing,
            sites=tuple(SiteFacts(s.name, s.domain, s.attributes, s.counts(federation.num_classes)) for s in sites),
            clients=names,
            samples=samples,
            stored=None if stored == shape else stored,
            prepared=federation.source.get("prepared", ""),
            protocol=federation.protocol,
            partition=federation.source.get("partition", {}),
            left_out=tuple(federation.source.get("left_out", ())),
        )

    @classmethod
    def merged(cls, name: str, known: Mapping[str, Facts], sites: Sequence[str]) -> Facts:
        """Merge the facts of single sites that fit together; of `sites`, some may not be known yet."""
        return replace(
            known[min(known)],
            name=name,
            sites=tuple(known[site].sites[0] if site in known else SiteFacts(site, site) for site in sites),
            clients=tuple(sites),
            samples=sum(facts.samples for facts in known.values()),
        )

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape of images as they are stored, and as files are read."""
        return self.stored or self.shape

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def domain_of(self) -> dict[str, str]:
        """The domain of each site."""
        return {site.name: site.domain for site in self.sites}

    @property
    def unseen(self) -> tuple[str, ...]:
        """The sites that have images, but none to train on."""
        return tuple(site.name for site in self.sites if site.images and "train" not in site.images)

    @property
    def class_counts(self) -> list[int]:
        """Training images per class over all sites; empty where they are not known.

        >>> sites = SiteFacts("a", "a", images={"train": [3, 4]}), SiteFacts("b", "b", images={"train": [0, 1]})
        >>> Facts("f", ("cat", "dog"), (3, 8, 8), "uint8", Preprocessing(), sites, ("a", "b"), 8).class_counts
        [3, 5]
        """
        if isinstance(self.clients, Numbered):
            raise BadInput(
                f'Federation "{self.name}" makes its {len(self.clients)} clients on demand, so the number of images '
                "per class is not known. Give the class weights as numbers."
            )
        return [sum(row) for row in zip(*(s.images["train"] for s in self.sites if "train" in s.images), strict=True)]

    def site(self, name: str) -> SiteFacts | None:
        """The site with this name, if there is one."""
        return next((site for site in self.sites if site.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for federation.json."""
        return {
            "name": self.name,
            "classes": list(self.classes),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "preprocessing": self.preprocessing.to_dict(),
            "sites": [{**vars(s), "attributes": dict(s.attributes), "images": dict(s.images)} for s in self.sites],
            "clients": vars(self.clients) if isinstance(self.clients, Numbered) else list(self.clients),
            "samples": self.samples,
            "stored": None if self.stored is None else list(self.stored),
            "prepared": self.prepared,
            "protocol": self.protocol.to_dict(),
            "partition": dict(self.partition),
            **({"left_out": list(self.left_out)} if self.left_out else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Facts:
        """The inverse of `to_dict`."""
        channels, height, width = values["shape"]
        stored = values.get("stored")
        return cls(
            name=values["name"],
            classes=tuple(values["classes"]),
            shape=(channels, height, width),
            dtype=values["dtype"],
            preprocessing=Preprocessing.from_dict(values["preprocessing"]),
            sites=tuple(SiteFacts(**site) for site in values["sites"]),
            clients=Numbered(**clients) if isinstance(clients := values["clients"], dict) else tuple(clients),
            samples=values["samples"],
            stored=None if stored is None else (stored[0], stored[1], stored[2]),
            prepared=values.get("prepared", ""),
            protocol=Protocol.from_dict(values.get("protocol", {})),
            partition=values.get("partition", {}),
            left_out=tuple(values.get("left_out", ())),
        )
