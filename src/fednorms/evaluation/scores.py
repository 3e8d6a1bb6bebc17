"""Scores of a model on the sites of a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fednorms.evaluation.predictions import Predictions


@dataclass
class Tally:
    """Counts over the batches of one site; nothing is averaged until the end, so batching never changes a score.

    >>> tally = Tally(classes=2)
    >>> tally.add(torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1, 1]))
    >>> score = tally.score()
    >>> round(score.accuracy, 4), score.recall, score.balanced_accuracy, score.samples
    (0.6667, [1.0, 0.5], 0.75, 3)
    """

    classes: int
    counts: Tensor | None = None  # (correct, total) x classes, on the logits' device: no waiting for a GPU
    loss_sum: Tensor | float = 0.0

    def add(self, logits: Tensor, y: Tensor) -> None:
        """Count one batch; the loss is plain cross-entropy, whatever the model was trained with."""
        right, loss = self.judge(logits, y)
        if self.counts is None:
            self.counts = torch.zeros(2, self.classes, dtype=torch.long, device=logits.device)
        self.counts[0].index_add_(0, y, right.long())
        self.counts[1].index_add_(0, y, torch.ones_like(y))
        self.loss_sum = self.loss_sum + loss.sum()

    @staticmethod
    def judge(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """For each image, whether it is classified correctly, and its cross-entropy."""
        logits = logits.detach().double()
        return logits.argmax(1) == y, torch.nn.functional.cross_entropy(logits, y, reduction="none")

    def score(self) -> SiteScore:
        """The scores of everything counted so far."""
        assert self.counts is not None
        right, total = self.counts.tolist()
        n = sum(total)
        recall = [r / t if t else math.nan for r, t in zip(right, total, strict=True)]
        present = [r for r in recall if not math.isnan(r)]
        return SiteScore(
            accuracy=sum(right) / n,
            balanced_accuracy=sum(present) / len(present),
            loss=float(self.loss_sum) / n,
            samples=n,
            recall=recall,
        )


@dataclass(frozen=True)
class SiteScore:
    """Scores on one site's data; `recall` has one entry per class, NaN where the site has no such sample.

    Across machines, `recall` is empty unless the site allows class counts to leave.
    """

    accuracy: float
    balanced_accuracy: float
    loss: float
    samples: int
    recall: list[float]

    @property
    def one_class(self) -> bool:
        """Whether all images are of one of several classes."""
        return len(self.recall) > 1 and sum(not math.isnan(r) for r in self.recall) == 1

    @classmethod
    def of(cls, said: Predictions) -> SiteScore:
        """The scores of predictions.

        >>> import numpy as np
        >>> SiteScore.of(Predictions(np.array([0, 1]), np.array([[0.5, 0.5], [0.75, 0.25]]))).recall
        [1.0, 0.0]
        """
        tally = Tally(said.classes)
        tally.add(torch.from_numpy(said.probabilities).double().clamp_min(1e-300).log(), torch.from_numpy(said.labels))
        return tally.score()

    def to_dict(self) -> dict[str, object]:
        """Everything as plain values, None for a recall that is not defined."""
        return {**vars(self), "recall": [None if math.isnan(r) else r for r in self.recall]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SiteScore:
        """The inverse of `to_dict`.

        >>> score = SiteScore(0.5, 0.5, 1.0, 2, [0.5])
        >>> SiteScore.from_dict(score.to_dict()) == score
        True
        """
        loss = math.nan if values["loss"] is None else values["loss"]  # a file holds null for what is not finite
        return cls(**{**values, "loss": loss, "recall": [math.nan if r is None else r for r in values["recall"]]})


@dataclass(frozen=True)
class Scores:
    """Scores on all sites, and the model (`mode`) and statistics that they belong to.

    `mean` and `std` (population form) are over sites, unweighted; `pooled` is over all samples; `domains` are over
    all samples of a domain.

    >>> a, b = Tally(2), Tally(2)
    >>> a.add(torch.eye(2), torch.tensor([0, 1])); b.add(torch.eye(2), torch.tensor([1, 1]))
    >>> names = {"x": "scanner A", "y": "scanner B"}
    >>> scores = Scores("global", "global", "test", {"x": a.score(), "y": b.score()}, names)
    >>> scores.mean, scores.std, scores.worst
    (0.75, 0.25, ('scanner B', 0.5))
    """

    mode: str
    statistics: str
    split: str
    sites: Mapping[str, SiteScore]
    domain_of: Mapping[str, str]

    @property
    def label(self) -> str:
        """Mode and statistics in one word: "personal/own"."""
        return f"{self.mode}/{self.statistics}"

    @property
    def domains(self) -> dict[str, float]:
        """Accuracy over all samples of each domain: clients that share out a test set score as the whole set does."""
        groups: dict[str, list[SiteScore]] = {}
        for site, score in self.sites.items():
            groups.setdefault(self.domain_of[site], []).append(score)
        return {d: sum(s.accuracy * s.samples for s in v) / sum(s.samples for s in v) for d, v in groups.items()}

    @property
    def mean(self) -> float:
        """Unweighted mean accuracy over sites."""
        return sum(s.accuracy for s in self.sites.values()) / len(self.sites)

    @property
    def std(self) -> float:
        """Population standard deviation of the accuracy over sites."""
        return math.sqrt(sum((s.accuracy - self.mean) ** 2 for s in self.sites.values()) / len(self.sites))

    @property
    def pooled(self) -> float:
        """Accuracy over all samples of all sites."""
        n = sum(s.samples for s in self.sites.values())
        return sum(s.accuracy * s.samples for s in self.sites.values()) / n

    @property
    def domain_mean(self) -> float:
        """Unweighted mean accuracy over domains."""
        return fmean(self.domains.values())

    @property
    def worst(self) -> tuple[str, float]:
        """The domain with the lowest accuracy."""
        return min(self.domains.items(), key=lambda item: item[1])

    @property
    def balanced_accuracy(self) -> float:
        """Unweighted mean over sites of the mean recall over classes."""
        return sum(s.balanced_accuracy for s in self.sites.values()) / len(self.sites)

    @property
    def loss(self) -> float:
        """Unweighted mean over sites of the cross-entropy."""
        return sum(s.loss for s in self.sites.values()) / len(self.sites)

    def judged(self, metric: str) -> float:
        """The number that a recipe's metric ("accuracy" or "balanced_accuracy") compares rounds and runs by."""
        return self.balanced_accuracy if metric == "balanced_accuracy" else self.mean

    def judged_domains(self, metric: str) -> dict[str, float]:
        """The same number for each domain; its balanced accuracy is the mean over its sites.

        >>> site = SiteScore(0.9, 0.5, 1.0, 10, [1.0, 0.0])
        >>> Scores("global", "global", "test", {"a": site}, {"a": "a"}).judged_domains("balanced_accuracy")
        {'a': 0.5}
        """
        if metric != "balanced_accuracy":
            return self.domains
        groups: dict[str, list[float]] = {}
        for site, score in self.sites.items():
            groups.setdefault(self.domain_of[site], []).append(score.balanced_accuracy)
        return {domain: fmean(found) for domain, found in groups.items()}

    def to_dict(self) -> dict[str, object]:
        """Everything as plain values."""
        domain, accuracy = self.worst
        return {
            "mode": self.mode,
            "statistics": self.statistics,
            "split": self.split,
            "mean": self.mean,
            "std": self.std,
            "pooled": self.pooled,
            "balanced_accuracy": self.balanced_accuracy,
            "loss": self.loss,
            "worst_domain": domain,
            "worst": accuracy,
            "domains": self.domains,
            "sites": {name: site.to_dict() for name, site in self.sites.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], domain_of: Mapping[str, str]) -> Scores:
        """Read what `to_dict` wrote; `domain_of` is that of the federation's `Facts`.

        >>> site = SiteScore(0.5, 0.5, 1.0, 2, [0.5, math.nan])
        >>> scores = Scores("personal", "own", "test", {"a": site}, {"a": "a"})
        >>> Scores.from_dict(scores.to_dict(), {"a": "a"}).to_dict() == scores.to_dict()
        True
        """
        sites = {name: SiteScore.from_dict(site) for name, site in values["sites"].items()}
        return cls(values["mode"], values["statistics"], values["split"], sites, domain_of)

    @staticmethod
    def in_row(row: Mapping[str, Any], domain_of: Mapping[str, str]) -> dict[str, Scores]:
        """The scores in a row of metrics.jsonl, by mode and split ("personal/own/test")."""
        return {name: Scores.from_dict(values, domain_of) for name, values in row["scores"].items()}

    def __repr__(self) -> str:
        per_domain = ", ".join(f"{d} {100 * a:.1f}" for d, a in self.domains.items())
        return f"Scores({self.label}, {self.split}: mean {100 * self.mean:.1f} ± {100 * self.std:.1f}; {per_domain})"
