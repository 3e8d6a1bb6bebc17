"""Propose a few methods for a federation, each with a reason; leave out what cannot work, with a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.explain.describe import Description, describe
from fednorms.methods.registry import method as read_method

Wanted = Literal["any", "one-model", "personal"]
RATES = (0.03, 0.1, 0.3)  # of SGD, half a decade apart
_HIGH = (0.3, 1.0, 3.0)  # FedFN divides features by their norm, which makes gradients small
_ADAM = (3e-4, 1e-3, 3e-3)
ALONE = "standalone"


@dataclass(frozen=True)
class Candidate:
    """A method that may be proposed, why, and the measure that speaks for it."""

    name: str
    why: str
    measure: str = ""


CANDIDATES = (
    Candidate("fedavg", "the baseline: one model, the least to send and to explain"),
    Candidate("fedbn", "keeps batch normalization at each site, for images that look different", "feature_w2_class"),
    Candidate("fedbn + fedfn", "like FedBN, with features of unit norm against label skew", "feature_w2_class"),
    Candidate("fedwon + fedfn", "one model without normalization layers, for different images", "feature_w2_class"),
    Candidate("gn", "group normalization needs no statistics that sites would have to share", "feature_w2_class"),
    Candidate("scaffold", "corrects the drift of sites whose gradients disagree", "gradient_b2"),
    Candidate("fedadam", "adaptive steps at the server, often faster when updates are small or sparse", "gradient_b2"),
    Candidate("ditto", "a personal model at every site, kept near the common one", "label_tv"),
    Candidate(ALONE, "every site for itself: shows whether federated training helps at all"),
)
_PRETRAINED = Candidate("greg + fedfa", "for published networks with batch normalization", "feature_w2_class")


@dataclass(frozen=True)
class Question:
    """What is asked for: the model and its images, how sites take part, and what the answer must be able to do."""

    model: str | nn.Module
    classes: int
    shape: tuple[int, int, int]
    sites: int
    rounds: int
    batch_size: int = 32
    expected: float = 0.0  # sites in a round
    unseen: int = 0  # sites that must be served and do not train
    wanted: Wanted = "any"
    pretrained: bool = False
    optimizer: str = "sgd"
    head: Sequence[str] = ()

    @property
    def visits(self) -> float:
        """How often a site is expected to take part."""
        return self.rounds * (self.expected or self.sites) / self.sites

    def facts(self) -> dict[str, Any]:
        """What is asked for, in words."""
        return {
            "wanted": self.wanted,
            "batch_size": self.batch_size,
            "sites_per_round": self.expected or self.sites,
            "rounds_per_site": self.visits,
            "stateless_sites": self.visits < 2,
            "unseen_sites": self.unseen,
            "pretrained": self.pretrained,
        }


@dataclass(frozen=True)
class Arm:
    """A method of the tournament: its rates, the reason, what it costs, and what is expected of it.

    `prior` is the number of points that it is expected to lose to the best method; None if nothing is known.
    """

    name: str
    method: str
    rates: tuple[float, ...]
    reason: str
    cost: Description
    prior: float | None = None

    @property
    def passes(self) -> float:
        """Passes over a site's data in a round, in those of FedAvg: what a round costs in time."""
        return self.cost.forward_passes + self.cost.extra_passes / 3  # a pass without gradients is a third

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; of the costs, bytes, state and passes."""
        shown = ("bytes_up", "bytes_down", "client_state", "server_state")
        cost = {name: getattr(self.cost, name) for name in shown}
        return {
            "name": self.name,
            "method": self.method,
            "rates": list(self.rates),
            "reason": self.reason,
            "prior": self.prior,
            "cost": {**cost, "passes": self.passes, "unseen": self.cost.unseen},
        }


@dataclass(frozen=True)
class Proposal:
    """The field of a tournament, and what was left out with the reason."""

    arms: list[Arm]
    excluded: dict[str, str] = field(default_factory=dict)


def propose(
    question: Question,
    measures: Mapping[str, float | None],
    priors: Mapping[str, float] | None = None,
    methods: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
) -> Proposal:
    """Propose arms for a question; `methods` replaces our candidates, `priors` has the points each is expected to lose.

    >>> two = Question("cnn-small", classes=10, shape=(3, 16, 16), sites=5, rounds=10, wanted="one-model")
    >>> found = propose(two, {}, methods=["fedavg", "fedbn"])
    >>> [arm.name for arm in found.arms], found.excluded
    (['fedavg'], {'fedbn': 'Sites keep 15 tensors of the model, and one model for all sites was asked for.'})
    """
    for text in methods or ():
        read_method(text)  # a name that does not exist is an error, not a method that does not fit
    known = {c.name: c for c in (*CANDIDATES, *([_PRETRAINED] if question.pretrained else []))}
    chosen = [known.get(m) or Candidate(m, "you named it") for m in methods or known]
    arms: list[Arm] = []
    excluded: dict[str, str] = {}
    for candidate in chosen:
        try:
            cost = describe(
                candidate.name,
                question.model,
                classes=question.classes,
                shape=question.shape,
                head=list(question.head) or None,
            )
        except BadInput as error:
            excluded[candidate.name] = str(error)
            continue
        if why := _impossible(cost, question):
            excluded[candidate.name] = why
            continue
        grid = tuple(rates) if rates else default_rates(cost.method, question.optimizer)
        reason = candidate.why + _measured(candidate.measure, measures)
        arms.append(Arm(candidate.name, cost.method, grid, reason, cost, (priors or {}).get(candidate.name)))
    best_first = sorted(arms, key=lambda arm: (arm.prior is None, arm.prior or 0.0))
    return Proposal(best_first, excluded)


def default_rates(method: str, optimizer: str) -> tuple[float, ...]:
    """Learning rates to try, half a decade apart.

    >>> default_rates("fedavg", "sgd"), default_rates("fedbn + fedfn", "sgd")
    ((0.03, 0.1, 0.3), (0.3, 1.0, 3.0))
    """
    if optimizer != "sgd":
        return _ADAM
    return _HIGH if "fedfn" in method else RATES


def _measured(name: str, measures: Mapping[str, float | None]) -> str:
    value = measures.get(name)
    return "" if value is None else f" ({_WORDS[name]} {value:.2g})"


_WORDS = {
    "feature_w2_class": "feature shift within classes",
    "gradient_b2": "gradient dissimilarity",
    "label_tv": "label skew",
}


def _impossible(cost: Description, question: Question) -> str:
    """Why a method cannot work here; empty if it can."""
    twin = bool(read_method(cost.method).doubling)
    kept = sum(route.name == "LOCAL" for route in cost.routes.values())
    keeps = f"Sites keep {counted(kept, 'tensor')} of the model" if kept else "Its models are personal"
    if question.unseen and (cost.unseen == "no" or twin):
        return f"{keeps}, which {counted(question.unseen, 'site')} without training data would not have."
    if question.wanted == "one-model" and (cost.unseen != "yes" or twin):
        return f"{keeps}, and one model for all sites was asked for."
    if question.batch_size == 1 and (cost.mixes_batch or not cost.batch_of_one):
        return "Batch normalization has no statistics to learn from in batches of one image."
    if question.visits < 2 and cost.client_state:
        return f"Each site takes part {question.visits:.2g} times, so what it keeps would never be used again."
    if question.pretrained and cost.lost_weights:
        return f"It replaces {len(cost.lost_weights)} of {cost.weights} published weights."
    return ""
