"""A federation: named sites that hold images and labels of one classification problem."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.markup import html_page, html_table
from fednorms.core.option_names import option
from fednorms.core.options import did_you_mean
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.facts import Facts
from fednorms.data.mapped import MappedImages
from fednorms.data.on_demand import OnDemand
from fednorms.data.problems import by, problems_of, raise_problems, some
from fednorms.data.protocol import Protocol
from fednorms.data.read_ahead import read_ahead
from fednorms.data.splits import split as divide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = Tensor | np.ndarray | Sequence[int]

_CHUNK = 256  # images in memory at once when a whole split is read
_SHOWN = 20  # sites in a repr


@dataclass(frozen=True, eq=False)
class Split:
    """Images x (uint8 or floating point, N x C x H x W) and their labels y (int64, N).

    x may be a `MappedImages`, which reads from disk; `batch` returns tensors in memory in both cases. `groups` are
    patients, and `files` the images' files, where they are known.
    The `Federation` that a split becomes part of checks it, and reports all problems together.

    >>> s = Split(torch.arange(8, dtype=torch.uint8).view(4, 1, 1, 2), torch.tensor([0, 1, 0, 1]))
    >>> x, y = s.batch([3, 0])
    >>> x.flatten().tolist(), y.tolist(), len(s.subset([1, 2]))
    ([6, 7, 0, 1], [1, 0], 2)
    """

    x: Tensor | MappedImages
    y: Tensor
    groups: np.ndarray | None = None
    files: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image: (C, H, W)."""
        return tuple(self.x.shape[1:])

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """The images and labels at `indices`, in that order, in memory."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        return self.x[at], self.y[at]

    def stream(self, plan: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the `batch` of every entry of a plan; from disk, the next batch is read while one is used.

        >>> s = Split(torch.zeros(3, 1, 2, 2), torch.tensor([5, 6, 7]))
        >>> [y.tolist() for _, y in s.stream([[0, 1], [2]])]
        [[5, 6], [7]]
        """
        slow = isinstance(self.x, MappedImages) and self.x.slow and len(plan) > 1
        return read_ahead(self.batch, plan) if slow else map(self.batch, plan)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the whole split in order, `size` images at a time (the last batch may be smaller).

        >>> s = Split(torch.zeros(5, 1, 2, 2), torch.zeros(5, dtype=torch.int64))
        >>> [len(y) for _, y in s.batches(2)]
        [2, 2, 1]
        """
        if isinstance(self.x, MappedImages):
            yield from self.stream(torch.arange(len(self)).split(size))
            return
        for start in range(0, len(self), size):
            yield self.x[start : start + size], self.y[start : start + size]

    def subset(self, indices: Indices) -> Split:
        """A split of only these images (a copy in memory; nothing is read for a `MappedImages`)."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        x = self.x.take(at.numpy()) if isinstance(self.x, MappedImages) else self.x[at]
        groups, files = (None if named is None else named[at.numpy()] for named in (self.groups, self.files))
        return Split(x, self.y[at], groups, files)

    def __repr__(self) -> str:
        return f"Split({len(self)} images of {by(self.shape)}, {self.x.dtype})"


@dataclass(frozen=True, eq=False)
class Site:
    """One participant: a name, the domain its images come from, and its data.

    A site with training data is a client. A site with only a test split is unseen: no model is trained on it.
    An empty split counts as none.

    >>> test = Split(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
    >>> Site("clinic", "phone", test=test).unseen
    True
    """

    name: str
    domain: str
    train: Split | None = None
    val: Split | None = None
    test: Split | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in ("train", "val", "test"):
            split = getattr(self, part)
            if split is not None and len(split) == 0 and len(split.y) == 0:
                object.__setattr__(self, part, None)
        object.__setattr__(self, "attributes", dict(self.attributes))

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that exist, by name ("train", "val", "test")."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {part: split for part, split in named.items() if split is not None}

    @property
    def unseen(self) -> bool:
        """Whether the site has no training data."""
        return self.train is None

    def counts(self, classes: int) -> dict[str, list[int]]:
        """Images per class in every split.

        >>> Site("a", "a", Split(torch.zeros(3, 1, 2, 2), torch.tensor([0, 2, 2]))).counts(3)
        {'train': [1, 0, 2]}
        """
        return {p: torch.bincount(s.y, minlength=classes).tolist() for p, s in self.splits.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{part}={len(split)}" for part, split in self.splits.items())
        return f"Site({self.name!r}, domain={self.domain!r}, {sizes or 'no data'})"


@dataclass(frozen=True, eq=False)
class Federation:
    """Sites that share a label set and an image shape; everything is checked on creation.

    `sites` are a list, or `OnDemand`: then clients are made when they take part, and changes such as `hold_out`, which
    need all of them, make them all.
    `source` records how the federation was made; a run stores it. `preprocessing` makes pixels the network's input.
    `protocol` is how the data set's papers augment and score, the default of a recipe.

    >>> x, y = torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])
    >>> Federation("two", [Site("a", "a", Split(x, y)), Site("b", "b", test=Split(x, y))], ["cat", "dog"])
    Federation 'two': 2 sites, 2 classes, images 1x8x8
    site  domain  train  val  test  classes
    a     a           4    -     -  2/2
    b     b           -    -     4  2/2
    >>> Federation("none", [], ["cat"])
    Traceback (most recent call last):
    fednorms.BadInput: Federation "none": it has no sites; give at least one with training data.
    """

    name: str
    sites: Sequence[Site]
    classes: Sequence[str]
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    source: Mapping[str, Any] = field(default_factory=dict)
    protocol: Protocol = field(default_factory=Protocol)
    proxy: Split | None = None
    """Labeled images at the server, for methods that need them: see `with_proxy`."""
    asked_for: tuple[str, Mapping[str, Any]] | None = field(default=None, init=False)
    """The name and options with which `fednorms.federation` made it. It is not an argument, so `replace`, and every
    method that makes another federation of this one, drops it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(str(c) for c in self.classes))
        sites = self.sites
        found = sites.of(self.name, len(self.classes)) if isinstance(sites, OnDemand) else tuple(sites)
        object.__setattr__(self, "sites", found)
        object.__setattr__(self, "source", dict(self.source))
        raise_problems(f'Federation "{self.name}"', problems_of(self))

    @property
    def examined(self) -> Sequence[Site]:
        """The sites that checks and the fingerprint look at: all, or a few of those that are made on demand."""
        return self.sites.examples if isinstance(self.sites, OnDemand) else self.sites

    @property
    def scored(self) -> Sequence[Site]:
        """The clients that are tested if they have images for it: all, or the first of those made on demand."""
        return self.sites.scored if isinstance(self.sites, OnDemand) else self.clients

    @cached_property
    def clients(self) -> Sequence[Site]:
        """The sites with training data, sorted by name: the order does not depend on how they were listed."""
        if isinstance(self.sites, OnDemand):
            return self.sites
        return tuple(sorted((s for s in self.sites if s.train is not None), key=lambda s: s.name))

    @cached_property
    def unseen(self) -> tuple[Site, ...]:
        """The sites without training data, sorted by name."""
        if isinstance(self.sites, OnDemand):
            return ()
        return tuple(sorted((s for s in self.sites if s.train is None), key=lambda s: s.name))

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The domain names, in the order of the sites; of clients made on demand, those of a few."""
        return tuple(dict.fromkeys(site.domain for site in self.examined))

    @cached_property
    def stored_shape(self) -> tuple[int, int, int]:
        """Shape of one image as it is stored: (C, H, W)."""
        channels, height, width = next(s for site in self.sites for s in site.splits.values()).shape
        return channels, height, width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the network's input, (C, H, W): that of the stored image unless preprocessing crops it."""
        channels, height, width = self.stored_shape
        return (channels, *self.preprocessing.window(height, width))

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def site(self, name: str) -> Site:
        """The site with this name."""
        if isinstance(self.sites, OnDemand) and name in self.sites.names:
            return self.sites.named(name)
        for site in self.examined:
            if site.name == name:
                return site
        problem = self._unknown(name, [s.name for s in self.examined], "site")
        raise BadInput(f'Federation "{self.name}": {problem}.')

    def fingerprint(self) -> str:
        """A hash of the content: classes, site names, domains, labels, pixels; not the order of the sites.

        It reads every image once and keeps the result. Of clients that are made on demand, it reads a few.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)

        def add(*words: object) -> None:
            for word in words:
                data = str(word).encode()
                digest.update(len(data).to_bytes(8, "little") + data)

        add(*self.classes)
        if isinstance(self.sites, OnDemand):
            add("on demand", len(self.sites), self.sites.images, self.sites.tested)
        for site in sorted(self.examined, key=lambda s: s.name):
            add("site", site.name, site.domain)
            for part, split in site.splits.items():
                add(part, len(split), split.shape, split.x.dtype)
                for x, y in split.batches(_CHUNK):
                    digest.update(y.contiguous().cpu().numpy().tobytes())
                    # Viewed as bytes, because NumPy has no bfloat16.
                    digest.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        for number, (x, y) in enumerate(self.proxy.batches(_CHUNK) if self.proxy else ()):
            add("proxy", number, len(y))
            digest.update(y.contiguous().cpu().numpy().tobytes())
            digest.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def remember(self, name: str, options: Mapping[str, Any]) -> Federation:
        """Record how this federation was opened, for recipes that name it; return the same object."""
        object.__setattr__(self, "asked_for", (name, dict(options)))
        return self

    def without(self, *names: str) -> Federation:
        """The federation without these sites (named by site or domain)."""
        gone = {site.name for site in self._select(names)}
        left = [site for site in self.sites if site.name not in gone]
        return replace(self, sites=left, source={**self.source, "without": sorted(gone)})

    def hold_out(self, *names: str) -> Federation:
        """Make these sites (named by site or domain) unseen: they keep only their test split.

        A site without a test split is tested on all its data. For leave-one-domain-out.

        >>> s = Split(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
        >>> both = Federation("f", [Site("a", "a", s, test=s), Site("b", "b", s, test=s)], ["0", "1"])
        >>> [site.name for site in both.hold_out("b").clients]
        ['a']
        """
        held = {site.name for site in self._select(names)}
        sites = [_test_only(site) if site.name in held else site for site in self.sites]
        return replace(self, sites=sites, source={**self.source, "hold_out": sorted(held)})

    def with_proxy(self, of: str | float | Split, seed: int = 0) -> Federation:
        """Give labeled images to the server: a fraction of each client's training images, a site's, or a `Split`.

        The fraction is taken evenly from all classes, and the clients train without it. A site (named by site or
        domain) leaves the federation, and the server gets its training images. With a `Split`, such as public images,
        the sites keep all of theirs.

        >>> s = Split(torch.zeros(8, 1, 4, 4), torch.tensor([0, 1] * 4))
        >>> both = Federation("f", [Site("a", "a", s, test=s), Site("b", "b", s, test=s)], ["0", "1"])
        >>> given = both.with_proxy(0.25)
        >>> len(given.proxy), [len(site.train) for site in given.clients]
        (4, [6, 6])
        >>> [site.name for site in both.with_proxy("b").sites], len(both.with_proxy("b").proxy)
        (['a'], 8)
        """
        if self.proxy is not None:
            raise BadInput(
                f'Federation "{self.name}": the server has {len(self.proxy)} images already. Call with_proxy once.'
            )
        if isinstance(of, Split):
            return replace(self, proxy=of, source={**self.source, "proxy": f"{len(of)} images"})
        share = _share(of)
        if share is None:
            gone = self._select([str(of)])
            if held := sorted({site.name for site in gone} & set(self.source.get("hold_out", []))):
                raise BadInput(
                    f'Federation "{self.name}": {", ".join(held)} cannot both be held out and give the server its '
                    f"images: they are test images. Name another site in {option('proxy')}, or in {option('hold_out')}."
                )
            left = [site for site in self.sites if site not in gone]
            given = [site.train or _test_only(site).test for site in gone]
        else:
            divided = [_divided(site, share, seed) for site in self.sites]
            left, given = [site for site, _ in divided], [images for _, images in divided]
        images = join_splits([split for split in given if split is not None and len(split)])
        if images is None:
            raise BadInput(
                f'Federation "{self.name}": {option("proxy")}{of} leaves no image for the server. Its smallest client '
                f"has {min(len(s.train) for s in self.clients if s.train is not None)} training images."
            )
        return replace(self, sites=left, proxy=images, source={**self.source, "proxy": of})

    def pooled(self, name: str = "pooled") -> Federation:
        """Make one client with all training (and validation) data; the sites are kept only for testing.

        >>> s = Split(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
        >>> Federation("f", [Site("a", "a", s, test=s), Site("b", "b", s, test=s)], ["0", "1"]).pooled()
        Federation 'f, pooled': 3 sites, 2 classes, images 1x4x4
        site    domain  train  val  test  classes
        pooled  pooled      4    -     -  2/2
        a       a           -    -     2  2/2
        b       b           -    -     2  2/2
        """
        pool = Site(
            name,
            name,
            join_splits([s.train for s in self.clients if s.train is not None]),
            join_splits([s.val for s in self.clients if s.val is not None]),
        )
        tested = [replace(site, train=None, val=None) for site in self.sites if site.test is not None]
        source = {**self.source, "pooled": name}
        return replace(self, name=f"{self.name}, {name}", sites=[pool, *tested], source=source)

    def to_dict(self) -> dict[str, Any]:
        """A summary in plain values, without images and labels."""
        facts = Facts.of(self).to_dict() | {"stored_shape": list(self.stored_shape), "source": dict(self.source)}
        shown = ("name", "classes", "shape", "stored_shape", "preprocessing", "protocol", "source", "sites")
        return {key: facts[key] for key in shown}

    def show(self, sites: Sequence[str] | None = None, classes: Sequence[str] | None = None) -> Figure:
        """Images of the sites as a matplotlib figure: a row per site, a column per class.

        Without names, up to 12 sites and 10 classes are shown. A notebook shows the figure; elsewhere,
        `federation.show().savefig("sites.png")`. Needs the extra "report".
        """
        from fednorms.data.show import sites_by_class

        return sites_by_class(self, sites, classes)

    def _table(self) -> list[tuple[str, ...]]:
        """The first sites: names, sizes, and how many classes they have; the header first."""
        rows: list[tuple[str, ...]] = [("site", "domain", "train", "val", "test", "classes")]
        for site in self.sites[:_SHOWN]:
            present = sum(map(any, zip(*site.counts(self.num_classes).values(), strict=True)))
            sizes = [str(len(site.splits[p])) if p in site.splits else "-" for p in ("train", "val", "test")]
            rows.append((site.name, site.domain, *sizes, f"{present}/{self.num_classes}"))
        return rows

    def _title(self) -> str:
        plural = "s" * (len(self.sites) != 1)
        head = f"Federation {self.name!r}: {len(self.sites)} site{plural}, {self.num_classes} classes"
        return f"{head}, images {by(self.shape)}"

    def _more(self) -> list[str]:
        return [f"... and {len(self.sites) - _SHOWN} more sites"] if len(self.sites) > _SHOWN else []

    def _repr_html_(self) -> str:
        header, *rows = self._table()
        return html_page(self._title(), html_table(header, rows, numbers_from=2), notes=self._more())

    def __repr__(self) -> str:
        rows = self._table()
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [
            "  ".join(c.rjust(w) if 2 <= i <= 4 else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
            for r in rows
        ]
        return "\n".join([self._title(), *(line.rstrip() for line in lines), *self._more()])

    def _select(self, names: Sequence[str]) -> list[Site]:
        known = [s.name for s in self.sites] + list(self.domains)
        raise_problems(
            f'Federation "{self.name}"',
            [self._unknown(n, known, "site or domain") for n in names if n not in known],
        )
        return [site for site in self.sites if site.name in names or site.domain in names]

    def _unknown(self, name: str, known: Sequence[str], what: str) -> str:
        return f'no {what} "{name}"; {did_you_mean(name, known)}it has {some(list(dict.fromkeys(known)))}'


def with_splits(site: Site, splits: Mapping[str, Split]) -> Site:
    """The same site with other data.

    >>> with_splits(Site("a", "b"), {"test": Split(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))})
    Site('a', domain='b', test=2)
    """
    return replace(site, train=splits.get("train"), val=splits.get("val"), test=splits.get("test"))


def _share(of: str | float) -> float | None:
    """The fraction that is meant, or None for the name of a site."""
    try:
        share = float(of)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise BadInput(f'{option("proxy").rstrip("=")} must be a fraction between 0 and 1, or a site; got "{of}".')
    return share


def _divided(site: Site, share: float, seed: int) -> tuple[Site, Split | None]:
    """A site without a share of its training images, and that share."""
    if site.train is None:
        return site, None
    found = divide(site.train.y, {"train": 1 - share, "proxy": share}, seed, f"{site.name} proxy", site.train.groups)
    return replace(site, train=site.train.subset(found["train"])), site.train.subset(found["proxy"])


def _test_only(site: Site) -> Site:
    whole = site.test or join_splits(list(site.splits.values()))
    return replace(site, train=None, val=None, test=whole)


def join_splits(splits: Sequence[Split]) -> Split | None:
    """Join splits in order (None for none); images of one file on disk stay there.

    >>> one = Split(torch.zeros(1, 1, 2, 2), torch.tensor([0]))
    >>> len(join_splits([one, one]))
    2
    """
    if not splits:
        return None
    y = torch.cat([s.y for s in splits])
    mapped = [s.x for s in splits if isinstance(s.x, MappedImages)]
    if len(mapped) == len(splits) and len({(type(x), x.path) for x in mapped}) == 1:
        return Split(mapped[0].select(np.concatenate([x.rows for x in mapped])), y)
    return Split(torch.cat([s.x[:] for s in splits]), y)
