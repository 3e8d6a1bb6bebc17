"""Rules that divide labelled samples over clients: frozen dataclasses with a text form, like methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import ClassVar, TypeVar, dataclass_transform

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.grammar import make_from, read_one
from fednorms.core.noise import seed_of
from fednorms.core.options import nearest, option, text_of, with_options

RULES: dict[str, type[Rule]] = {}


def draws(*names: object) -> np.random.RandomState:
    """Random numbers that depend on names alone. NumPy promises never to change what a RandomState draws.

    >>> int(draws("a", 1).randint(1000)) == int(draws("a", 1).randint(1000))
    True
    """
    word = seed_of(*names)
    return np.random.RandomState([word >> 32, word & 0xFFFFFFFF])


class Rule:
    """Base of all rules: `divide` gives every client its positions in an array of labels.

    Clients are disjoint and together hold every sample, unless a rule says otherwise. `within="domain"` applies the
    rule to every domain by itself, with that many clients in each; "all" pools the domains first. `test` says what
    becomes of validation and test data: "deal" divides each domain's over its clients in equal shares of every class,
    "alike" gives a client the classes it trains on (where the rule knows them), "personal" draws for every class as
    many as the client trains on, or as there are (FedFN's public code; clients overlap), "whole" tests every client on
    all of them.
    """

    name: ClassVar[str]
    exhaustive: ClassVar[bool] = True
    smallest: ClassVar[int] = 1
    clients: int
    within: str
    test: str

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        raise NotImplementedError

    def alike(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray] | None:
        """Another split divided by the same class list (drawn from an equal `r`), or None if there is no such list."""
        return None

    def __call__(self, labels: object, seed: int = 0, classes: int | None = None) -> dict[int, np.ndarray]:
        """Divide labels: {client: sorted positions}."""
        y = np.asarray(labels, dtype=np.int64)
        if y.ndim != 1 or not len(y) or y.min() < 0:
            raise BadInput(f"{self.name}: expected labels 0, 1, ... with one axis, got an array of shape {y.shape}.")
        return dict(enumerate(self.shares(y, classes or int(y.max()) + 1, ("labels", seed))))

    def shares(self, y: np.ndarray, classes: int, scope: tuple[object, ...]) -> list[np.ndarray]:
        """`divide` with its own random numbers, checked and sorted."""
        if len(y) < self.clients * self.smallest:
            raise BadInput(
                f"{self}: {self.clients} clients of at least {self.smallest} samples need "
                f"{self.clients * self.smallest} samples, but there are {len(y)}; ask for fewer clients."
            )
        found = [np.sort(at).astype(np.int64) for at in self.divide(y, classes, draws("partition", *scope))]
        if empty := [k for k, at in enumerate(found) if not len(at)]:
            raise BadInput(
                f"{self}: {len(empty)} of {self.clients} clients would have no training data; ask for fewer clients."
            )
        return found

    def __str__(self) -> str:
        return text_of(self, always=("clients",))


R = TypeVar("R", bound=type[Rule])


@dataclass_transform(frozen_default=True, field_specifiers=(field, option))
def rule_class(name: str) -> Callable[[R], R]:
    """Class decorator: a frozen, validated dataclass known to `rule` by name."""

    def decorate(cls: R) -> R:
        RULES[name] = made = with_options(name, cls)
        return made

    return decorate


def within_option(default: str = "all") -> str:
    """Whether a rule divides each domain or all data together."""
    return option(default, choices=("all", "domain"))


def split_option(default: str = "deal") -> str:
    """What becomes of the test data."""
    return option(default, choices=("deal", "alike", "personal", "whole"))


def rule(text: str | Rule) -> Rule:
    """Read a rule from its text form.

    >>> rule("dirichlet(beta=0.3, clients=20)").beta
    0.3
    >>> rule("dirichlett(beta=0.3)")
    Traceback (most recent call last):
    fednorms.BadInput: Unknown partition "dirichlett": did you mean "dirichlet"? Known: ...
    """
    if isinstance(text, Rule):
        return text
    from fednorms.data import domain_rules, label_rules  # noqa: F401  (they register themselves)

    name, options = read_one(text, "partition", "dirichlet(beta=0.3, clients=100)")
    if name not in RULES:
        raise BadInput(f'Unknown partition "{name}": {nearest(name, RULES)}.')
    return make_from(f"Partition {name}", RULES[name], options)


def rules() -> dict[str, str]:
    """Every rule and one line about it.

    >>> "sharding" in rules()
    True
    """
    from fednorms.data import domain_rules, label_rules  # noqa: F401

    return {name: (cls.__doc__ or "").strip().splitlines()[0] for name, cls in sorted(RULES.items())}
