"""How much differential privacy a run has used: epsilon after each round, by the package dp-accounting.

Paper: Rényi Differential Privacy of the Sampled Gaussian Mechanism. Mironov, Talwar and Zhang. arXiv 2019.
https://arxiv.org/abs/1908.10530
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.sampling import Participation
from fednorms.core.views import Mechanism

# Whole numbers only: between them the package's series for small sampling rates does not always converge.
ORDERS = (*range(2, 65), 72, 80, 96, 128, 192, 256, 512)
LEFT_OUT = "a client's update left out or not"
REPLACED = "a client replaced by any other"
ANY_UPDATE = "any two updates of one client"


@dataclass
class Guarantee:
    """(epsilon, delta)-differential privacy at the level of clients, after each round of a run.

    `secret` is whether nobody knows who took part in a round: only then does drawing clients at random add to their
    privacy. Otherwise the client that took part most often decides.

    >>> g = Guarantee("dpcentral", Mechanism(1.0, 2.0, 1e-5, "server"), Participation.read("all"), ("a", "b"))
    >>> g.epsilon(0), 0 < g.epsilon(1) < g.epsilon(10)
    (0.0, True)
    """

    part: str
    mechanism: Mechanism
    participation: Participation
    clients: Sequence[str]
    seed: int = 0
    secret: bool = True
    _came: Counter[str] = field(default_factory=Counter)
    _counted: int = 0

    @classmethod
    def of(
        cls, method: Method, participation: Participation, clients: Sequence[str], seed: int, *, secret: bool = True
    ) -> Guarantee | None:
        """The guarantee of a method; None if it has no noise."""
        name, mechanism = _mechanism(method)
        if mechanism is None or not mechanism.noise:
            return None
        if mechanism.delta * len(clients) >= 1:
            raise BadInput(
                f"{name}: delta must be well below 1/{len(clients)}, one over the number of clients, got "
                f"{mechanism.delta}. Publishing one client's data would satisfy a larger delta."
            )
        _package()
        return cls(name, mechanism, participation, tuple(clients), seed, secret)

    @property
    def relation(self) -> str:
        """The two situations that nobody can tell apart."""
        if self.mechanism.where == "client":
            return ANY_UPDATE
        return REPLACED if self._drawn else LEFT_OUT

    def epsilon(self, t: int) -> float:
        """Epsilon after t rounds, an upper bound."""
        z, q = self.mechanism.noise, self.participation.expected(len(self.clients)) / len(self.clients)
        if self.mechanism.where == "client":
            return self._gaussian(z / 2, self._most(t))
        if self._drawn:  # two cohorts of equal size differ in two clients: the one that left and the one that came
            return min(self._renyi(t), self._gaussian(z / 2, t))
        if self.secret and q < 1:
            return min(self._renyi(t), self._gaussian(z, t))
        return self._gaussian(z, self._most(t))

    def to_dict(self, t: int) -> dict[str, Any]:
        """The entry in a summary."""
        return {
            "part": self.part,
            "epsilon": self.epsilon(t),
            "delta": self.mechanism.delta,
            "neighbours": self.relation,
            "cohorts": "secret" if self.secret else "known",
        }

    @property
    def _drawn(self) -> bool:
        """Whether a fixed number of clients is drawn without replacement, in secret, by a server that adds noise."""
        some = self.participation.expected(len(self.clients)) < len(self.clients)
        return self.mechanism.where == "server" and self.secret and some and self.participation.kind == "fixed"

    def _gaussian(self, multiplier: float, times: int) -> float:
        """Epsilon of Gaussian noise applied several times: exactly that of one time with less noise."""
        if not times:
            return 0.0
        return float(_package().get_epsilon_gaussian(multiplier / math.sqrt(times), self.mechanism.delta))

    def _renyi(self, t: int) -> float:
        if not t:
            return 0.0
        epsilon, _ = _package().rdp.compute_epsilon(ORDERS, t * self._one_round, self.mechanism.delta)
        return float(epsilon)

    @cached_property
    def _one_round(self) -> Any:  # noqa: ANN401
        """Renyi divergences of one round with randomly drawn clients."""
        dp, z, n = _package(), self.mechanism.noise, len(self.clients)
        m = self.participation.expected(n)
        if self._drawn:
            event = dp.SampledWithoutReplacementDpEvent(n, int(m), dp.GaussianDpEvent(z / 2))
            accountant = dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
        else:
            event = dp.PoissonSampledDpEvent(m / n, dp.GaussianDpEvent(z))
            accountant = dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_SPECIAL)
        return accountant.compose(event).rdp

    def _most(self, t: int) -> int:
        """How many of the first t rounds the most frequent client took part in."""
        if self.participation.kind == "all":
            return t
        if t < self._counted:
            self._came, self._counted = Counter(), 0
        for round_ in range(self._counted, t):
            self._came.update(self.participation.cohort(self.clients, self.seed, round_))
        self._counted = t
        return max(self._came.values(), default=0)


def epsilon_of_answers(noises: Sequence[float], delta: float) -> float:
    """Epsilon of answers of one client, each with its own Gaussian noise: any two updates are 2 clips apart.

    Noise multipliers z_i compose exactly to a single one of 1 / sqrt(sum 1 / z_i^2).

    >>> epsilon_of_answers([], 1e-5), epsilon_of_answers([1.0, 0.0], 1e-5)
    (0.0, inf)
    >>> abs(epsilon_of_answers([4.0] * 4, 1e-5) - epsilon_of_answers([2.0], 1e-5)) < 1e-9
    True
    """
    if not noises:
        return 0.0
    if not all(z > 0 for z in noises):
        return math.inf
    multiplier = 1 / math.sqrt(sum(1 / z**2 for z in noises))
    return float(_package().get_epsilon_gaussian(multiplier / 2, delta))


def example(method: Method) -> str:
    """Describe a method's differential privacy, with epsilon for runs in which every client takes part.

    >>> from fednorms.methods.registry import method
    >>> example(method("fedprox"))
    ''
    >>> print(example(method("dpcentral(noise=2) + fedbn")))
    dpcentral: updates no longer than 1.0, noise of std 2 on their sum, added by the server.
    Epsilon at delta 1e-05, every client in every round: 1.99 after 1 round, 7... after 10 rounds, 3... after 100 rounds
    (a client's update left out or not).
    """
    name, found = _mechanism(method)
    if found is None:
        return ""
    if not found.noise:
        return f"{name}: updates no longer than {found.clip}, no noise: no differential privacy."
    where = "each, added at the site" if found.where == "client" else "their sum, added by the server"
    said = f"{name}: updates no longer than {found.clip}, noise of std {found.noise * found.clip:g} on {where}."
    guarantee = Guarantee(name, found, Participation(), ("a", "b"))
    try:
        after = [f"{guarantee.epsilon(t):.3g} after {t} round{'s' * (t > 1)}" for t in (1, 10, 100)]
    except BadInput as error:
        return f"{said}\n{error}"
    every = f"Epsilon at delta {found.delta:g}, every client in every round: {', '.join(after)}"
    return f"{said}\n{every}\n({guarantee.relation})."


def _mechanism(method: Method) -> tuple[str, Mechanism | None]:
    """The part that protects what clients send, by name, and its mechanism."""
    if method.privacy is None:
        return "", None
    part, privacy = method.privacy
    return part.name, privacy.mechanism


def _package() -> Any:  # noqa: ANN401
    """The package dp-accounting, or an error with the command that installs it."""
    if find_spec("dp_accounting") is None:
        raise BadInput(
            "Differential privacy needs the package dp-accounting, which computes epsilon. "
            "Install it with: pip install 'fednorms[dp]'"
        )
    return importlib.import_module("dp_accounting")
