"""Divide the data of a federation over new clients by a rule; store the division as a file with a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.data.domain_rules import Heterogeneity
from fednorms.data.federation import Federation, Site, Split, join_splits
from fednorms.data.label_rules import by_class, dealt_evenly
from fednorms.data.rules import Rule, draws, rule

_PARTS = ("train", "val", "test")
_FORMAT = "fednorms partition 1"


@dataclass(frozen=True, eq=False)
class Partition:
    """A division of data over clients: for every client its domain and, per split, positions.

    Positions count through that split of all sites with training data, in the federation's order. `sizes` are the
    lengths of the three splits; they prevent that a partition is applied to other data by mistake.

    >>> p = Partition("by hand", 0, {"a": ("x", {"train": np.array([0, 2])})}, {"train": 3})
    >>> p.hash == Partition("by hand", 0, {"a": ("x", {"train": np.array([0, 2])})}, {"train": 3}).hash
    True
    """

    rule: str
    seed: int
    clients: Mapping[str, tuple[str, Mapping[str, np.ndarray]]]
    sizes: Mapping[str, int]

    @property
    def hash(self) -> str:
        """A hash of names and positions, independent of the rule that made them."""
        digest = hashlib.blake2b(digest_size=16)
        for name, (domain, parts) in sorted(self.clients.items()):
            digest.update(json.dumps([name, domain]).encode())
            for part in _PARTS:
                at = np.ascontiguousarray(parts.get(part, np.empty(0)), dtype="<i8")
                digest.update(part.encode() + len(at).to_bytes(8, "little") + at.tobytes())
        return digest.hexdigest()

    def apply(self, federation: Federation) -> Federation:
        """Return the federation with these clients; sites without training data stay as they are."""
        sources = {part: _sources(federation, part) for part in _PARTS}
        found = {part: sum(len(s) for s in splits) for part, splits in sources.items() if splits}
        if found != {part: n for part, n in self.sizes.items() if n}:
            raise BadInput(
                f'The partition was made for {_counted(self.sizes)}, but federation "{federation.name}" has '
                f"{_counted(found)}. Use the data it was made for."
            )
        sites = []
        for name, (domain, parts) in self.clients.items():
            train, val, test = (_gather(sources[part], parts.get(part)) for part in _PARTS)
            sites.append(Site(name, domain, train, val, test, _common(federation, domain)))
        taken = {site.name for site in sites}
        sites += [replace(s, name=f"{s.name} (unseen)") if s.name in taken else s for s in federation.unseen]
        source = {**federation.source, "partition": {"rule": self.rule, "seed": self.seed, "hash": self.hash}}
        return replace(federation, name=f"{federation.name}, {self.rule}", sites=sites, source=source)

    def save(self, path: str | Path) -> str:
        """Write it as .json (readable) or .npz (small), and return its hash."""
        file = Path(path)
        head = {"format": _FORMAT, "rule": self.rule, "seed": self.seed, "sizes": dict(self.sizes), "hash": self.hash}
        clients = list(self.clients.items())
        if file.suffix == ".json":
            body = [
                {"name": n, "domain": d, **{p: at.tolist() for p, at in parts.items()}} for n, (d, parts) in clients
            ]
            file.write_text(json.dumps({**head, "clients": body}), encoding="utf-8")
        elif file.suffix == ".npz":
            named = [{"name": n, "domain": d} for n, (d, _) in clients]
            arrays = {f"{i}.{p}": at for i, (_, (_, parts)) in enumerate(clients) for p, at in parts.items()}
            text = np.frombuffer(json.dumps({**head, "clients": named}).encode(), dtype=np.uint8)
            with file.open("wb") as stream:
                np.savez_compressed(stream, allow_pickle=False, head=text, **arrays)
        else:
            raise BadInput(f'Partition: the file must end in .json or .npz, got "{path}".')
        return self.hash

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read a file of `save`; refuse one whose hash does not match its content."""
        file = Path(path)
        try:
            arrays: dict[str, np.ndarray] = {}
            if file.suffix == ".npz":
                with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                    arrays = dict(stored)
                head = json.loads(arrays.pop("head").tobytes())
            else:
                head = json.loads(file.read_text(encoding="utf-8"))
            if head["format"] != _FORMAT:
                raise BadInput(f'Partition file "{path}" has format "{head["format"]}", expected "{_FORMAT}".')
            clients = {}
            for i, row in enumerate(head["clients"]):
                stored_parts: dict[str, Any] = {p: arrays.get(f"{i}.{p}", row.get(p)) for p in _PARTS}
                parts = {p: np.asarray(at, dtype=np.int64) for p, at in stored_parts.items() if at is not None}
                clients[str(row["name"])] = (str(row["domain"]), parts)
            made = cls(str(head["rule"]), int(head["seed"]), clients, dict(head["sizes"]))
            told = head["hash"]
        except BadInput:
            raise
        except Exception as error:  # damaged archives raise almost anything
            raise BadInput(
                f'Cannot read the partition "{path}" ({type(error).__name__}: {error}); '
                "expected a .json or .npz file written by Partition.save."
            ) from None
        if made.hash != told:
            raise BadInput(
                f'Partition file "{path}" was changed or damaged: its hash is {made.hash}, but it states {told}.'
            )
        return made


def plan(federation: Federation, by: str | Rule, seed: int = 0) -> Partition:
    """Plan how a rule would divide `federation`, without copying any data.

    >>> from fednorms.data.registry import federation
    >>> p = plan(federation("digits-shift"), "even_domain_split(clients=2)")
    >>> list(p.clients)[:3]
    ['clean-0', 'clean-1', 'negative-0']
    """
    chosen = rule(by)
    trained = _trained(federation)
    domain_of = {part: _per_sample(trained, part) for part in _PARTS}
    labels = {part: _labels(trained, part) for part in _PARTS}
    domains = list(dict.fromkeys(site.domain for site in trained))
    apart = chosen.within == "domain"
    groups = [(d, [d]) for d in domains] if apart else [(domains[0] if len(domains) == 1 else "mixed", domains)]
    clients: dict[str, tuple[str, dict[str, np.ndarray]]] = {}
    for number, (domain, members) in enumerate(groups):
        at = {part: np.flatnonzero(np.isin(domain_of[part], [domains.index(d) for d in members])) for part in _PARTS}
        y = {part: labels[part][at[part]] for part in _PARTS}
        shares = _divide(chosen, y, federation.num_classes, (seed, domain if apart else "all"))
        prefix = domain if apart and len(groups) > 1 else "client"
        for k, name in enumerate(_numbered(prefix, chosen.clients)):
            parts = {part: at[part][mine[k]] for part, mine in shares.items() if len(mine[k])}
            clients[name] = (groups[number][0], parts)
    return Partition(str(chosen), seed, clients, {part: len(y) for part, y in labels.items() if len(y)})


def partition(federation: Federation, by: str | Rule | Path, seed: int = 0) -> Federation:
    """Divide a federation's data over other clients, by a rule or by a saved file ("file:PATH").

    The result depends only on labels, domains, rule and seed. Test data follow the rule's `test`; sites without
    training data are kept. `fednorms list partitions` shows the rules.

    >>> from fednorms.data.registry import federation
    >>> skewed = partition(federation("digits-shift"), "dirichlet_client(beta=0.3, clients=3, within=domain)")
    >>> len(skewed.clients), skewed.clients[0]
    (15, Site('clean-0', domain='clean', train=84, val=12, test=24))
    """
    if isinstance(by, Path) or (isinstance(by, str) and by.startswith("file:")):
        return Partition.load(str(by).removeprefix("file:")).apply(federation)
    made = plan(federation, by, seed).apply(federation)
    if note := _cut_from_sorted(rule(by), federation, made):
        made = replace(made, source={**made.source, "notes": [*made.source.get("notes", []), note]})
    return made


def _cut_from_sorted(by: Rule, before: Federation, after: Federation) -> str:
    """A note if a rule that cuts data in their order met data that are sorted by class."""
    if not isinstance(by, Heterogeneity):
        return ""
    there = {d: {int(c) for s in _trained(before) if s.domain == d for c in s.train.y.unique()} for d in before.domains}  # type: ignore[union-attr]
    held = [(len(s.train.y.unique()), len(there[s.domain])) for s in after.clients if s.train is not None]
    poor = sum(mine <= max(1, every // 2) for mine, every in held if every > 2)
    if 2 * poor <= len(held):
        return ""
    least = min(mine for mine, _ in held)
    return (
        f"{by} cuts each domain in the order of its images, which are sorted by class here: {poor} of {len(held)} "
        f"clients have at most half of the classes (the poorest {least}). For a random division use even_domain_split"
    )


def _divide(
    chosen: Rule, y: Mapping[str, np.ndarray], classes: int, scope: tuple[object, ...]
) -> dict[str, list[np.ndarray]]:
    found = {"train": chosen.shares(y["train"], classes, scope)}
    for part in ("val", "test"):
        if not len(y[part]):
            continue
        r = draws("partition", part, *scope)
        same = chosen.alike(y[part], classes, draws("partition", *scope)) if chosen.test == "alike" else None
        if chosen.test == "alike" and same is None:
            raise BadInput(f"{chosen}: test=alike needs a rule with a class list (sharding, group_sizes).")
        if same is not None:
            found[part] = [np.sort(at) for at in same]
        elif chosen.test == "personal":
            found[part] = [personal(y["train"][at], y[part], classes, r) for at in found["train"]]
        elif chosen.test == "whole":
            found[part] = [np.arange(len(y[part]))] * chosen.clients
        else:
            found[part] = list(dealt_evenly(y[part], classes, chosen.clients, r))
    return found


def personal(train: np.ndarray, test: np.ndarray, classes: int, r: np.random.RandomState) -> np.ndarray:
    """Draw a test set with a client's class mix: for each class min(trained on, available) test images, at random.

    The rule of FedFN's public code for Dirichlet splits; the sets of different clients overlap.

    >>> personal(np.array([0, 0, 2]), np.array([0, 1, 2, 2]), 3, np.random.RandomState(0)).size
    2
    """
    wanted = np.bincount(train, minlength=classes)
    return np.sort(
        np.concatenate([r.permutation(at)[:n] for at, n in zip(by_class(test, classes), wanted, strict=True)])
    )


def _trained(federation: Federation) -> list[Site]:
    return [site for site in federation.sites if site.train is not None]


def _sources(federation: Federation, part: str) -> list[Split]:
    return [site.splits[part] for site in _trained(federation) if part in site.splits]


def _labels(sites: list[Site], part: str) -> np.ndarray:
    held = [site.splits[part].y.numpy() for site in sites if part in site.splits]
    return np.concatenate(held) if held else np.empty(0, np.int64)


def _per_sample(sites: list[Site], part: str) -> np.ndarray:
    domains = list(dict.fromkeys(site.domain for site in sites))
    held = [np.full(len(site.splits[part]), domains.index(site.domain)) for site in sites if part in site.splits]
    return np.concatenate(held) if held else np.empty(0, np.int64)


def _common(federation: Federation, domain: str) -> dict[str, str]:
    """The attributes that all sites of a domain have in common."""
    held = [set(site.attributes.items()) for site in _trained(federation) if site.domain == domain]
    return dict(sorted(set.intersection(*held))) if held else {}


def _gather(splits: list[Split], at: np.ndarray | None) -> Split | None:
    if at is None or not len(at):
        return None
    if at.min() < 0 or at.max() >= sum(map(len, splits)):
        raise BadInput(f"Partition: position {at.max()} does not exist among {sum(map(len, splits))} samples.")
    taken, start = [], 0
    for split in splits:
        inside = at[(at >= start) & (at < start + len(split))] - start
        if len(inside) == len(split) and (inside == np.arange(len(split))).all():
            taken.append(split)  # all of it, so nothing is copied
        elif len(inside):
            taken.append(split.subset(inside))
        start += len(split)
    return taken[0] if len(taken) == 1 else join_splits(taken)


def _numbered(prefix: str, count: int) -> list[str]:
    """Numbered names of equal length, which sort in their order."""
    if count == 1 and prefix != "client":
        return [prefix]
    width = len(str(count - 1))
    return [f"{prefix}-{k:0{width}d}" for k in range(count)]


def _counted(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {part}" for part, n in sizes.items() if n) or "no samples"
