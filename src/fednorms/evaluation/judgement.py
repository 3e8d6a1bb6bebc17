"""A judgement of a model: metrics per site, per class and pooled over sites, each with an interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fednorms.core.optional import new_frame
from fednorms.evaluation.calibration import Bin
from fednorms.evaluation.intervals import Interval

if TYPE_CHECKING:
    from pandas import DataFrame

OVERALL = ("accuracy", "balanced_accuracy", "f1", "auroc", "auprc", "brier", "ece", "cross_entropy")
PER_CLASS = ("recall", "specificity", "precision", "f1", "auroc", "auprc")


@dataclass(frozen=True)
class ClassJudgement:
    """How a model does on one class against the rest; `n` images belong to it.

    Recall is also called sensitivity, precision positive predictive value. A number is NaN where the images do not
    define it: recall without an image of the class, precision if the class is never predicted.
    """

    n: int
    recall: Interval
    specificity: Interval
    precision: Interval
    f1: Interval
    auroc: Interval
    auprc: Interval

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"n": self.n} | {name: getattr(self, name).to_dict() for name in PER_CLASS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClassJudgement:
        """The inverse of `to_dict`."""
        return cls(values["n"], *(Interval.from_dict(values[name]) for name in PER_CLASS))


@dataclass(frozen=True)
class OperatingPoint:
    """A binary model that says `positive` from a probability of `threshold` on, which validation images chose.

    `rule` says how; `chosen_on` is the number of validation images.
    """

    positive: str
    threshold: float
    rule: str
    chosen_on: int
    confusion: list[list[int]]
    accuracy: Interval
    sensitivity: Interval
    specificity: Interval
    precision: Interval
    negative_predictive_value: Interval

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {k: v.to_dict() if isinstance(v, Interval) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OperatingPoint:
        """The inverse of `to_dict`."""
        read: dict[str, Any] = {k: Interval.from_dict(v) if isinstance(v, dict) else v for k, v in values.items()}
        return cls(**read)


@dataclass(frozen=True)
class SiteJudgement:
    """How a model does on the images of one site, or of all sites pooled.

    - `confusion[i][j]` counts images of class i that were predicted as class j.
    - `balanced_accuracy` and `f1` are means over classes that have images; `auroc` and `auprc` are means over classes
      of each class against the rest.
    - `brier` is the mean over images of the squared error of the probabilities: summed over classes, halved if there
      are two (as in scikit-learn). `ece` is the calibration error over `bins`.
    - `groups` counts patients, where they are known: intervals then draw whole patients.
    """

    n: int
    groups: int | None
    confusion: list[list[int]]
    accuracy: Interval
    balanced_accuracy: Interval
    f1: Interval
    auroc: Interval
    auprc: Interval
    brier: Interval
    ece: Interval
    cross_entropy: Interval
    bins: list[Bin]
    classes: dict[str, ClassJudgement]
    operating_point: OperatingPoint | None = None

    @property
    def worst_class(self) -> str | None:
        """The class with the lowest recall; None without images."""
        known = {name: c.recall.value for name, c in self.classes.items() if c.recall.defined}
        return min(known, key=known.__getitem__) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, None for what is not defined."""
        return {
            "n": self.n,
            "groups": self.groups,
            "confusion": self.confusion,
            **{name: getattr(self, name).to_dict() for name in OVERALL},
            "bins": [b.to_dict() for b in self.bins],
            "classes": {name: c.to_dict() for name, c in self.classes.items()},
            **({"operating_point": self.operating_point.to_dict()} if self.operating_point else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SiteJudgement:
        """The inverse of `to_dict`."""
        point = values.get("operating_point")
        return cls(
            n=values["n"],
            groups=values["groups"],
            confusion=values["confusion"],
            **{name: Interval.from_dict(values[name]) for name in OVERALL},
            bins=[Bin.from_dict(b) for b in values["bins"]],
            classes={name: ClassJudgement.from_dict(c) for name, c in values["classes"].items()},
            operating_point=None if point is None else OperatingPoint.from_dict(point),
        )


@dataclass(frozen=True)
class Judgement:
    """How good a model is: per site, pooled over all images, and where it is worst.

    `mode` and `statistics` say which model was tested: "averaged" is the mean of personal models. `mean` is the mean
    accuracy over sites. Every number is an `Interval` of 95 %. `notes` say what a reader should know, such as sites
    with too few images.
    """

    mode: str
    statistics: str
    split: str
    classes: list[str]
    sites: dict[str, SiteJudgement]
    pooled: SiteJudgement
    mean: Interval
    metric: str = "accuracy"
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Mode and statistics in one word: "personal/own"."""
        return f"{self.mode}/{self.statistics}"

    @property
    def worst_site(self) -> str:
        """The site with the lowest accuracy (or balanced accuracy, if that is the run's metric)."""
        return min(self.sites, key=lambda s: getattr(self.sites[s], self.metric).value)

    @property
    def worst_class(self) -> str | None:
        """The class with the lowest recall over the images of all sites."""
        return self.pooled.worst_class

    @property
    def spread(self) -> dict[str, float]:
        """Population standard deviation, lowest and highest of the accuracy over sites."""
        values = np.array([getattr(s, self.metric).value for s in self.sites.values()])
        return {"std": float(values.std()), "lowest": float(values.min()), "highest": float(values.max())}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "mode": self.mode,
            "statistics": self.statistics,
            "split": self.split,
            "metric": self.metric,
            "classes": self.classes,
            "mean": self.mean.to_dict(),
            "spread": self.spread,
            "worst_site": self.worst_site,
            "worst_class": self.worst_class,
            "pooled": self.pooled.to_dict(),
            "sites": {name: s.to_dict() for name, s in self.sites.items()},
            "notes": self.notes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Judgement:
        """The inverse of `to_dict`."""
        return cls(
            values["mode"],
            values["statistics"],
            values["split"],
            list(values["classes"]),
            {name: SiteJudgement.from_dict(s) for name, s in values["sites"].items()},
            SiteJudgement.from_dict(values["pooled"]),
            Interval.from_dict(values["mean"]),
            values["metric"],
            list(values["notes"]),
        )

    def to_frame(self) -> DataFrame:
        """One line per site and class, then pooled, as a pandas DataFrame; needs the extra "frame".

        The class "all" has the numbers over all classes. Every number has columns for its interval: accuracy,
        accuracy_low, accuracy_high.
        """
        lines = []
        for site, judged in {**self.sites, "pooled": self.pooled}.items():
            lines.append({"site": site, "class": "all", "n": judged.n} | _columns(judged, OVERALL))
            for name, c in judged.classes.items():
                lines.append({"site": site, "class": name, "n": c.n} | _columns(c, PER_CLASS))
        return new_frame(lines)

    def to_markdown(self) -> str:
        """The tables of sites and classes as Markdown."""
        from fednorms.evaluation.shown import markdown

        return markdown(self)

    def __repr__(self) -> str:
        from fednorms.evaluation.shown import text

        return text(self)

    def _repr_html_(self) -> str:
        from fednorms.evaluation.shown import page

        return page(self)


def _columns(judged: object, names: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in names:
        number: Interval = getattr(judged, name)
        found |= {name: number.value, f"{name}_low": number.low, f"{name}_high": number.high}
    return found
