"""Clients that are made when they take part: a federation of any size, described by a number and a rule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.data.problems import data_problems, raise_problems

if TYPE_CHECKING:
    from fednorms.data.federation import Site

T = TypeVar("T")
_EXAMPLES = 8  # clients that are made to check and to identify a federation
_KEPT = 256  # clients in memory besides the tested ones


@dataclass(frozen=True)
class Numbered(Sequence[str]):
    """The names "client-000" to "client-999" without a list of them: of equal length, so they sort by number.

    >>> names = Numbered("client", 1000)
    >>> names[7], names[-1], "client-007" in names, "client-7" in names, names.index("client-012")
    ('client-007', 'client-999', True, False, 12)
    """

    prefix: str
    size: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    @override
    def __getitem__(self, at: int | slice) -> str | list[str]:
        found = range(self.size)[at]
        return self._name(found) if isinstance(found, int) else [self._name(number) for number in found]

    def _name(self, number: int) -> str:
        return f"{self.prefix}-{number:0{len(str(self.size - 1))}d}"

    @override
    def __contains__(self, name: object) -> bool:
        return self._number(name) is not None

    @override
    def index(self, name: object, start: int = 0, stop: int | None = None) -> int:
        number = self._number(name)
        if number is None or number not in range(self.size)[start:stop]:
            raise ValueError(f"{name!r} is not a name")
        return number

    def _number(self, name: object) -> int | None:
        digits = name.removeprefix(f"{self.prefix}-") if isinstance(name, str) else ""
        number = int(digits) if digits.isdecimal() and len(digits) < 19 else self.size
        return number if number < self.size and self._name(number) == name else None


class OnDemand(Sequence["Site"]):
    """The sites of a federation that are made by a rule when they are needed, and forgotten afterwards.

    `make(name, number)` returns the site of that name with its training images. It must return the same site every
    time, so its random numbers are seeded by the name or the number. `images` is the mean number of training images of
    a client; parts that compare a client with the mean use it. Only the first `tested` clients are tested: validation
    and test images of the others are ignored. A few sites are checked at once, the others when they are made.

    >>> import torch
    >>> from fednorms.data.federation import Federation, Site, Split
    >>> def make(name: str, number: int) -> Site:
    ...     draws = torch.Generator().manual_seed(number)
    ...     x = torch.randint(256, (4, 1, 8, 8), generator=draws, dtype=torch.uint8)
    ...     return Site(name, "phone", Split(x, torch.randint(2, (4,), generator=draws)))
    >>> crowd = Federation("crowd", OnDemand(make, 1_000_000, images=4), ["cat", "dog"])
    >>> len(crowd.clients), crowd.site("client-123456")
    (1000000, Site('client-123456', domain='phone', train=4))
    """

    def __init__(
        self, make: Callable[[str, int], Site], clients: int, images: float, tested: int = 0, prefix: str = "client"
    ) -> None:
        problems = [
            f"{what} must be {least} or more, got {value}"
            for what, value, least in (("clients", clients, 1), ("images", images, 1), ("tested", tested, 0))
            if not value >= least
        ]
        problems += [f"tested must be at most {clients}, the number of clients, got {tested}"] * (tested > clients)
        raise_problems("OnDemand", problems)
        self.make, self.images, self.tested = make, images, tested
        self.names = Numbered(prefix, clients)
        self._federation, self._classes = "", 0
        self._kept: OrderedDict[int, Site] = OrderedDict()  # least recently used first

    def of(self, federation: str, classes: int) -> OnDemand:
        """The same clients, checked as those of a federation with this name and number of classes."""
        found = OnDemand(self.make, len(self), self.images, self.tested, self.names.prefix)
        found._federation, found._classes = federation, classes
        return found

    @property
    def samples(self) -> int:
        """The number of training images of all clients, from their mean."""
        return round(self.images * len(self))

    @property
    def scored(self) -> list[Site]:
        """The clients that are tested."""
        return [self[number] for number in range(self.tested)]

    @property
    def examples(self) -> list[Site]:
        """A few clients, the first and the last among them."""
        last = len(self) - 1
        return [self[number] for number in sorted({last * i // (_EXAMPLES - 1) for i in range(_EXAMPLES)})]

    def named(self, name: str) -> Site:
        """The site of this name; a KeyError if there is none."""
        if name not in self.names:
            raise KeyError(name)
        return self[self.names.index(name)]

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Site: ...
    @overload
    def __getitem__(self, at: slice) -> list[Site]: ...
    @override
    def __getitem__(self, at: int | slice) -> Site | list[Site]:
        found = range(len(self))[at]
        if not isinstance(found, int):
            return [self[number] for number in found]
        if found in self._kept:
            self._kept.move_to_end(found)
        else:
            self._kept[found] = self._made(found)
            if len(self._kept) > _KEPT + self.tested:
                self._kept.popitem(last=False)
        return self._kept[found]

    def _made(self, number: int) -> Site:
        name = self.names[number]
        site = self.make(name, number)
        where = f'Federation "{self._federation}", client {number} of {len(self)}'
        if site.name != name or site.train is None:
            images = "no training images" if site.train is None else f"{len(site.train)} training images"
            raise BadInput(
                f'{where}: make("{name}", {number}) must return a site of this name with training images, got site '
                f'"{site.name}" with {images}.'
            )
        if self._classes:
            raise_problems(where, data_problems(site, self._classes))
        return site if number < self.tested else replace(site, val=None, test=None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": OrderedDict()}


class ByName(Mapping[str, T]):
    """What is asked of clients that are made on demand, by name.

    >>> sizes = ByName(OnDemand(lambda name, number: None, 10, images=1), lambda site: 1)
    >>> len(sizes), "client-3" in sizes, "client-10" in sizes
    (10, True, False)
    """

    def __init__(self, sites: OnDemand, what: Callable[[Site], T]) -> None:
        self.sites, self.what = sites, what

    def __getitem__(self, name: str) -> T:
        return self.what(self.sites.named(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites.names)

    def __len__(self) -> int:
        return len(self.sites)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self.sites.names
