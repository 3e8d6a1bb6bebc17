"""Rules that divide labeled samples over clients: frozen dataclasses with a text form, like methods."""

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
    """Random numbers that depend only on names. NumPy promises never to change what a RandomState draws.

    >>> int(draws("a", 1).randint(1000)) == int(draws("a", 1).randint(1000))
    True
    """
    word = seed_of(*names)
    return np.random.RandomState([word >> 32, word & 0xFFFFFFFF])


class Rule:
    """Base class of all rules: `divide` gives every client its positions in an array of labels.

    Clients are disjoint and together hold every sample, unless a rule says otherwise. `within="domain"` applies the
    rule to each domain separately, with that many clients in each; "all" pools the domains first. `test` decides how
    validation and test data are divided:

    - "deal": over the clients of their domain, in equal shares of every class.
    - "alike": by the classes that a client trains on (for rules with a class list).
    - "personal": for every class, as many images as the client trains on, or as many as there are (the rule of FedFN's
      public code). The clients' sets overlap.
    - "whole": every client is tested on all of them.
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
        """Divide another split by the same class list (drawn from an equal `r`), or None for rules without a list."""
        return None

    def __call__(self, labels: object, seed: int = 0, classes: int | None = None) -> dict[int, np.ndarray]:
        """Divide labels and return {client: sorted positions}."""
        y = np.asarray(labels, dtype=np.int64)
        if y.ndim != 1 or not len(y) or y.min() < 0:
            raise BadInput(f"{self.name}: expected labels 0, 1, ... with one axis, got an array of shape {y.shape}.")
        return dict(enumerate(self.shares(y, classes or int(y.max()) + 1, ("labels", seed))))

    def shares(self, y: np.ndarray, classes: int, scope: tuple[object, ...]) -> list[np.ndarray]:
        """Call `divide` with its own random numbers; check and sort the result."""
        if len(y) < self.clients * self.smallest:
            raise BadInput(
                f"{self}: {self.clients} clients of at least {self.smallest} samples need "
                f"{self.clients * self.smallest} samples, but there are {len(y)}. Ask for fewer clients."
            )
        found = [np.sort(at).astype(np.int64) for at in self.divide(y, classes, draws("partition", *scope))]
        if empty := [k for k, at in enumerate(found) if not len(at)]:
            raise BadInput(
                f"{self}: {len(empty)} of {self.clients} clients would have no training data. Ask for fewer clients."
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
    """How validation and test data are divided."""
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
    if not isinstance(text, str):
        raise BadInput(f'A partition must be text or a rule, such as "dirichlet(beta=0.3, clients=100)", got {text!r}.')
    name, options = read_one(text, "partition", "dirichlet(beta=0.3, clients=100)")
    if name not in (known := _registered()):
        raise BadInput(f'Unknown partition "{name}": {nearest(name, known)}.')
    return make_from(f"Partition {name}", known[name], options)


def rules() -> dict[str, str]:
    """The names of all rules, with one line each.

    >>> "sharding" in rules()
    True
    """
    return {name: (cls.__doc__ or "").strip().splitlines()[0] for name, cls in sorted(_registered().items())}


def _registered() -> dict[str, type[Rule]]:
    from fednorms.data import domain_rules, label_rules  # noqa: F401  (importing them registers their rules)

    return RULES
