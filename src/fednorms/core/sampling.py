"""Which clients take part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.noise import seed_of
from fednorms.core.options import shortened


@dataclass(frozen=True)
class Participation:
    """All clients, a fixed number drawn without replacement, or each with a given probability.

    Written "all", "fixed:10" (clients), "fixed:0.1" (a fraction, at least one) or "bernoulli:0.4" (drawn again while
    nobody is chosen). Draws are hashed from (seed, round), so every method sees the same cohorts.

    >>> len(Participation.read("fixed:2").cohort(["a", "b", "c"], seed=0, t=5))
    2
    >>> Participation.read("all").cohort(["a", "b"], seed=0, t=0)
    ['a', 'b']
    """

    kind: Literal["all", "fixed", "bernoulli"] = "all"
    rate: float = 1.0
    empty: bool = False  # whether a round may have no clients, as privacy accounting assumes

    @classmethod
    def read(cls, text: str) -> Participation:
        """Read participation from its text form."""
        kind, _, number = text.partition(":")
        try:
            if kind == "all" and not number:
                return cls()
            rate = float(number)
            if kind == "bernoulli" and 0 < rate <= 1:
                return cls("bernoulli", rate)
            if kind == "fixed" and (0 < rate < 1 or (1 <= rate < 2**63 and rate == int(rate))):
                return cls("fixed", rate if "." in number else int(number))
        except ValueError:
            pass
        raise BadInput(
            f'Cannot read participation "{shortened(text)}". Expected "all", "fixed:10" (clients), '
            '"fixed:0.1" (a fraction) or "bernoulli:0.4" (probability of each client).'
        )

    def expected(self, clients: int) -> float:
        """The expected number of participants in a round.

        >>> Participation.read("fixed:0.1").expected(25), Participation.read("bernoulli:0.1").expected(25)
        (2, 2.5)
        """
        if self.kind == "fixed":
            return (
                self.rate if isinstance(self.rate, int) else max(int(self.rate * clients + 1e-9), 1)
            )  # 0.29 * 100 is slightly below 29
        return self.rate * clients if self.kind == "bernoulli" else clients

    def cohort(self, clients: Sequence[str], seed: int, t: int) -> list[str]:
        """The participants of round t, in the order of `clients`."""
        if self.kind == "all":
            return list(clients)
        if self.kind == "fixed":
            m = int(self.expected(len(clients)))
            if m > len(clients):
                raise BadInput(f"Participation asks for {m} clients, but the federation has {len(clients)}.")
            rng = np.random.default_rng(seed_of("cohort", seed, t))
            chosen = rng.choice(len(clients), size=m, replace=False)  # takes m draws, however many clients there are
            return [clients[i] for i in sorted(chosen.tolist())]
        for toss in range(1000):
            rng = np.random.default_rng(seed_of("cohort", seed, t, toss))
            present = [clients[i] for i in np.flatnonzero(rng.random(len(clients)) <= self.rate).tolist()]
            if present or self.empty:
                return present
        raise BadInput(f"Participation bernoulli:{self.rate} chose nobody in 1000 draws. Raise the probability.")
