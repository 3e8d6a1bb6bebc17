"""Partition rules that look at labels: which client holds how much of which class.

Papers:
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    https://arxiv.org/abs/1602.05629 (iid, sharding)
    Acar et al., Federated Learning Based on Dynamic Regularization (FedDyn), ICLR 2021,
    https://arxiv.org/abs/2111.04263 (dirichlet_client, log-normal sizes)
    Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, CVPR 2022,
    https://arxiv.org/abs/2203.11751 (the same)
    Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019,
    https://arxiv.org/abs/1905.12022 (dirichlet)
    Oh, Kim, Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022,
    https://arxiv.org/abs/2106.06042 (sharding, group_sizes)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.options import option
from fednorms.data.client_sizes import log_dirichlet, lognormal_sizes, renormalized
from fednorms.data.rules import Rule, rule_class, split_option, within_option

RESTARTS = 100


def by_class(y: np.ndarray, classes: int) -> list[np.ndarray]:
    """The positions of every class, in the data's order.

    >>> [at.tolist() for at in by_class(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y, minlength=classes))[:-1])


@rule_class("iid")
class IID(Rule):
    """Shuffle and split evenly; balanced=true gives every client n_c / K of each class (to within one sample).

    Sizes differ by at most one. sigma > 0 draws log-normal sizes instead (FedDC's unbalanced data: 0.3).

    >>> {k: len(at) for k, at in IID(clients=3)([0, 1] * 5).items()}
    {0: 4, 1: 3, 2: 3}
    """

    clients: int = option(100, at_least=1)
    balanced: bool = option(False, choices=(False, True))
    sigma: float = option(0.0, at_least=0.0, at_most=5.0)
    within: str = within_option()
    test: str = split_option()

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        if self.balanced and self.sigma:
            raise BadInput(f"{self}: balanced and sigma contradict each other. Keep one of them.")
        if self.balanced:
            # In turn, class by class: neither a class nor a size is off by more than one.
            cards = np.concatenate([r.permutation(at) for at in by_class(y, classes)])
            return [cards[k :: self.clients] for k in range(self.clients)]
        shuffled = r.permutation(len(y))
        if not self.sigma:
            return np.array_split(shuffled, self.clients)
        sizes = lognormal_sizes(len(y), self.clients, self.sigma, r)
        return np.split(shuffled, np.cumsum(sizes)[:-1])


@rule_class("dirichlet_client")
class DirichletClient(Rule):
    """Equal sizes (sigma=0) and skewed labels: client k draws classes from q_k ~ Dir(beta), image by image.

    Clients take turns at random. Each draws a class from q_k restricted to the classes that still have images. This
    gives the same distribution as drawing again until a class has images, as the public code does, which can loop for
    hours. sigma > 0 draws log-normal sizes. Acar et al., FedDyn (ICLR 2021); Gao et al., FedDC (CVPR 2022).

    >>> {k: len(at) for k, at in DirichletClient(clients=4, beta=0.3)([0, 1, 2, 3] * 5).items()}
    {0: 5, 1: 5, 2: 5, 3: 5}
    """

    clients: int = option(100, at_least=1)
    beta: float = option(0.3, above=0.0)
    sigma: float = option(0.0, at_least=0.0, at_most=5.0)
    within: str = within_option()
    test: str = split_option()

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        sizes = lognormal_sizes(len(y), self.clients, self.sigma, r)
        logs = log_dirichlet(self.beta, (self.clients, classes), r)
        left = [r.permutation(at).tolist() for at in by_class(y, classes)]
        there = np.array([bool(at) for at in left])
        cumulative = np.cumsum(renormalized(logs, there), axis=1).tolist()
        open_ = list(range(self.clients))
        got: list[list[int]] = [[] for _ in open_]
        for turn, pick in r.random_sample((len(y), 2)).tolist():
            place = int(turn * len(open_))
            k = open_[place]
            c = bisect_right(cumulative[k], pick * cumulative[k][-1])
            if c == classes:  # rounding can carry the product to the very end
                c = int(np.flatnonzero(there)[-1])
            got[k].append(left[c].pop())
            if not left[c]:
                there[c] = False
                if there.any():
                    cumulative = np.cumsum(renormalized(logs, there), axis=1).tolist()
            if len(got[k]) == sizes[k]:
                open_[place] = open_[-1]
                open_.pop()
        return [np.array(at, dtype=np.int64) for at in got]


@rule_class("dirichlet")
class DirichletClass(Rule):
    """Skewed labels and sizes: each class is cut over the clients in shares p ~ Dir(beta), full clients left out.

    For every class, clients that hold N / K samples or more get nothing; the others share it by p, renormalized. If the
    smallest client has fewer than `smallest` samples, everything is drawn again, up to 100 times. After that, the
    largest clients give single samples of their most common class to the smallest until every client has enough (the
    public code would never end). Yurochkin et al. (ICML 2019), whose code leaves full clients out; used by FedNTD,
    FedFN, MOON and EasyFL ("LDA").

    >>> shares = DirichletClass(clients=4, beta=0.1)([0, 1, 2, 3] * 20)
    >>> sum(map(len, shares.values())), min(map(len, shares.values())) >= 10
    (80, True)
    """

    clients: int = option(100, at_least=1)
    beta: float = option(0.3, above=0.0)
    smallest: int = option(10, at_least=1)  # type: ignore[misc]
    within: str = within_option()
    test: str = split_option()

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        owner = self._draw(y, classes, r)
        for _ in range(RESTARTS):
            if np.bincount(owner, minlength=self.clients).min() >= self.smallest:
                break
            owner = self._draw(y, classes, r)
        else:
            _fill_up(owner, y, self.clients, self.smallest)
        return by_class(owner, self.clients)

    def _draw(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> np.ndarray:
        owner = np.empty(len(y), dtype=np.int64)
        held = np.zeros(self.clients, dtype=np.int64)
        for at in by_class(y, classes):
            shuffled = r.permutation(at)
            room = held < len(y) / self.clients
            if not len(at):
                continue
            p = renormalized(log_dirichlet(self.beta, (self.clients,), r), room)
            ends = np.floor(np.cumsum(p) * (len(at) / p.sum()) + 1e-9).astype(np.int64)
            ends[np.flatnonzero(p)[-1] :] = len(at)  # so that rounding leaves nothing for a client without a share
            count = np.diff(ends, prepend=0)
            owner[shuffled] = np.repeat(np.arange(self.clients), count)
            held += count
        return owner


@rule_class("sharding")
class Sharding(Rule):
    """Every client takes `shards` pieces of one class each, so it sees at most that many classes.

    Each class is cut, in the data's order, into shards * K / C equal pieces (K * shards must be divisible by C); the
    list of classes, each as often as it has pieces, is shuffled and dealt; a client takes one random remaining piece of
    each class it was dealt. Test data are divided by the same list. McMahan et al. 2017, as in FedBABU and FedFN.

    >>> shares = Sharding(clients=4, shards=1)([0, 1] * 10)
    >>> {k: len(at) for k, at in shares.items()}
    {0: 5, 1: 5, 2: 5, 3: 5}
    """

    clients: int = option(100, at_least=1)
    shards: int = option(10, at_least=1)
    within: str = within_option()
    test: str = split_option("alike")

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        return [np.concatenate(p) for p in _dealt(y, _class_list(self, self.clients, self.shards, classes, r), r)]

    def alike(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The same class list for another split."""
        return self.divide(y, classes, r)


@rule_class("group_sizes")
class GroupSizes(Rule):
    """Sizes in steps: of K / group groups, group i has clients of N / K + delta (i + 1 - mean of i + 1) samples.

    Clients k and K - 1 - k share the same classes (at most `shards`); together they hold what two clients of
    `sharding` hold. Oh et al., FedBABU (ICLR 2022), unbalanced setting.

    >>> {k: len(at) for k, at in GroupSizes(clients=4, group=1, delta=2, shards=2)([0, 1] * 20).items()}
    {0: 7, 1: 9, 2: 11, 3: 13}
    """

    clients: int = option(100, at_least=2)
    group: int = option(10, at_least=1)
    delta: float = option(50.0, at_least=0.0)
    shards: int = option(10, at_least=1)
    within: str = within_option()
    test: str = split_option("alike")

    def divide(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The positions of each client."""
        if self.clients % 2 or self.clients % self.group:
            raise BadInput(f"{self}: clients must be even and a multiple of group, got {self.clients}.")
        step = np.arange(self.clients // self.group) + 1.0
        size = np.repeat(len(y) / self.clients + self.delta * (step - step.mean()), self.group)
        if size[0] < 1:
            raise BadInput(f"{self}: the smallest group would have {size[0]:.1f} samples. Lower delta.")
        pairs = self.clients // 2
        pieces = _dealt(y, _class_list(self, pairs, self.shards, classes, r), r)
        found: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        for k, mine in enumerate(pieces):
            fraction = size[k] / (size[k] + size[-1 - k])
            carry = 0.0
            for piece in mine:
                wish = len(piece) * fraction + carry
                cut = min(max(round(wish), 0), len(piece))
                carry = wish - cut
                found[k].append(piece[:cut])
                found[-1 - k].append(piece[cut:])
        return [np.concatenate(at) for at in found]

    def alike(self, y: np.ndarray, classes: int, r: np.random.RandomState) -> list[np.ndarray]:
        """The same class list for another split, in equal sizes: all clients have equally large test sets."""
        pieces = _dealt(y, _class_list(self, self.clients // 2, self.shards, classes, r), r)
        first, second = ([np.concatenate([p[half::2] for p in mine]) for mine in pieces] for half in (0, 1))
        return [*first, *reversed(second)]


def _class_list(rule: Rule, owners: int, shards: int, classes: int, r: np.random.RandomState) -> np.ndarray:
    if owners * shards % classes:
        raise BadInput(
            f"{rule}: {owners} x {shards} pieces do not divide evenly into {classes} classes; "
            f"choose clients and shards with a product that is a multiple of {classes}."
        )
    listed = np.repeat(np.arange(classes), owners * shards // classes)
    return r.permutation(listed).reshape(owners, shards)


def _dealt(y: np.ndarray, class_list: np.ndarray, r: np.random.RandomState) -> list[list[np.ndarray]]:
    """For every row of the list, take one random remaining piece of each class in the row."""
    classes = int(class_list.max()) + 1
    times = class_list.size // classes
    pieces = [np.array_split(at, times) for at in by_class(y, classes)]
    turn = [r.permutation(times).tolist() for _ in pieces]
    return [[pieces[c][turn[c].pop()] for c in row] for row in class_list]


def _fill_up(owner: np.ndarray, y: np.ndarray, clients: int, smallest: int) -> None:
    size = np.bincount(owner, minlength=clients)
    while size.min() < smallest:
        rich, poor = int(np.argmax(size)), int(np.argmin(size))
        held = np.flatnonzero(owner == rich)
        commonest = np.argmax(np.bincount(y[held]))
        owner[held[y[held] == commonest][-1]] = poor
        size[rich] -= 1
        size[poor] += 1


def dealt_evenly(y: np.ndarray, classes: int, clients: int, r: np.random.RandomState) -> Sequence[np.ndarray]:
    """Equal shares of every class, to within one sample; clients may be left without any.

    >>> [len(at) for at in dealt_evenly(np.array([0, 0, 1, 1]), 2, 2, np.random.RandomState(0))]
    [2, 2]
    """
    cards = np.concatenate([r.permutation(at) for at in by_class(y, classes)])
    return [np.sort(cards[k::clients]) for k in range(clients)]
