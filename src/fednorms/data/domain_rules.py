"""Partition rules that look at domains: which client sees which domain.

Papers:
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
    https://arxiv.org/abs/2102.07623 (heterogeneity)
    Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without Normalization, ICLR 2024,
    https://arxiv.org/abs/2306.05879 (even_domain_split)
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.options import option
from fednorms.data.rules import Rule, rule_class, split_option


@rule_class("one_domain_per_client")
class OneDomainPerClient(Rule):
    """One client per domain, which holds all of it (sites of one domain are joined).

    >>> OneDomainPerClient()([0, 1, 1])
    {0: array([0, 1, 2])}
    """

    clients = 1  # type: ignore[misc]
    within = "domain"
    test: str = split_option()

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        return [np.arange(len(y))]


@rule_class("even_domain_split")
class EvenDomainSplit(Rule):
    """Every domain is shuffled and split over `clients` clients of nearly equal size (FedWon's cross-device Digits).

    >>> {k: len(at) for k, at in EvenDomainSplit(clients=20)(np.zeros(7438, int)).items()}[0]
    372
    """

    clients: int = option(20, at_least=1)
    within = "domain"
    test: str = split_option()

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        return np.array_split(r.permutation(len(y)), self.clients)


@rule_class("heterogeneity")
class Heterogeneity(Rule):
    """FedBN's levels of heterogeneity: each domain is cut, in order, into `parts`; the first `level` are clients.

    Part i is int(n i / parts) to int(n (i + 1) / parts). More clients hold more data of the same domains, so the
    federation gets less heterogeneous; not exhaustive below level = parts. Li et al., FedBN (ICLR 2021), Fig. 4.

    >>> [len(at) for at in Heterogeneity(level=2)(np.zeros(7438, int)).values()]
    [743, 744]
    """

    exhaustive = False

    level: int = option(1, at_least=1)
    parts: int = option(10, at_least=1)
    within = "domain"
    test: str = split_option("whole")

    @property
    def clients(self) -> int:  # type: ignore[override]
        """The level: clients per domain."""
        return self.level

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        if self.level > self.parts:
            raise BadInput(f"{self}: level must be at most parts, got {self.level} of {self.parts}.")
        ends = [len(y) * i // self.parts for i in range(self.level + 1)]
        return [np.arange(a, b) for a, b in pairwise(ends)]
