"""What must be known about a federation to use a trained model where its data are not: written into every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fednorms.core.errors import RunFailed
from fednorms.data import Federation, Preprocessing, Protocol
from fednorms.runs.session import Session
from fednorms.runs.store.atomic import write_atomic
from fednorms.runs.store.directory import RunDirectory


@dataclass(frozen=True)
class SiteFacts:
    """A site without its data; `images` counts them per split and class."""

    name: str
    domain: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """How many images it trains on.

        >>> SiteFacts("a", "a", images={"train": [3, 4]}).samples
        7
        """
        return sum(self.images.get("train", []))


@dataclass(frozen=True)
class Facts:
    """A federation without its data: classes, shape, preprocessing and sites; `clients` are those that train.

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
    clients: tuple[str, ...]
    samples: int
    stored: tuple[int, int, int] | None = None  # the shape of images before their middle is cut out, if that differs
    prepared: str = ""  # what a data set's reader does to pictures beside resizing them
    protocol: Protocol = field(default_factory=Protocol)
    partition: Mapping[str, Any] = field(default_factory=dict)  # rule, seed and hash, if the data were divided anew

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape of images as they are stored, and as files are read."""
        return self.stored or self.shape

    @property
    def preparation(self) -> list[str]:
        """What a user of files should know, if they were not just resized for training."""
        said = f"The training images were prepared ({self.prepared}), and files are only resized: prepare them alike."
        return [said] if self.prepared else []

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def site(self, name: str) -> SiteFacts | None:
        """The site with this name, if there is one."""
        return next((site for site in self.sites if site.name == name), None)

    @classmethod
    def of(cls, session: Session) -> Facts:
        """The facts of a session's federation and of those of its sites that train."""
        federation, clients = session.federation, session.engine.clients
        return cls.from_dict(
            federation.to_dict()
            | {"dtype": _dtype(federation), "clients": list(clients), "samples": session.task.samples}
            | {"stored": list(federation.stored_shape) if federation.stored_shape != federation.shape else None}
            | {"prepared": federation.source.get("prepared", "")}
            | {"partition": federation.source.get("partition", {})}
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "name": self.name,
            "classes": list(self.classes),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "preprocessing": self.preprocessing.to_dict(),
            "sites": [{**vars(s), "attributes": dict(s.attributes), "images": dict(s.images)} for s in self.sites],
            "clients": list(self.clients),
            "samples": self.samples,
            "stored": None if self.stored is None else list(self.stored),
            "prepared": self.prepared,
            "protocol": self.protocol.to_dict(),
            "partition": dict(self.partition),
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
            clients=tuple(values["clients"]),
            samples=values["samples"],
            stored=None if stored is None else (stored[0], stored[1], stored[2]),
            prepared=values.get("prepared", ""),
            protocol=Protocol.from_dict(values.get("protocol", {})),
            partition=values.get("partition", {}),
        )


def write_facts(directory: RunDirectory, session: Session) -> None:
    """Write a run's federation.json, once."""
    path = directory.facts_path
    if not path.exists():
        write_atomic(path, (json.dumps(Facts.of(session).to_dict(), indent=1) + "\n").encode())


def read_facts(directory: RunDirectory) -> Facts | None:
    """A run's federation.json; None if it has none."""
    path = directory.facts_path
    try:
        return Facts.from_dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(f"cannot read {path} ({error}): remove it, and `fednorms resume` writes it again") from error


def _dtype(federation: Federation) -> str:
    split = next(s for site in federation.sites for s in site.splits.values())
    return str(split.x.dtype).removeprefix("torch.")
