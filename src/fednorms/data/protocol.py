"""How papers augment, train and score on a data set; a recipe's "auto" takes these values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fednorms.core.errors import BadInput

Metric = Literal["accuracy", "balanced_accuracy"]


@dataclass(frozen=True)
class Protocol:
    """Settings that come with a data set: augmentation, loss, class weights and metric.

    `augment` is a chain of `fednorms.transforms.CHAINS` or "none"; without `class_weights` every class has weight 1.

    >>> Protocol("flip_rotate")
    Protocol(augment='flip_rotate', loss='cross_entropy', class_weights=(), metric='accuracy')
    >>> Protocol.from_dict(Protocol("flip").to_dict()) == Protocol("flip")
    True
    """

    augment: str = "none"
    loss: str = "cross_entropy"
    class_weights: tuple[float, ...] = ()
    metric: Metric = "accuracy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weights", tuple(float(w) for w in self.class_weights))
        if self.metric not in get_args(Metric):
            raise BadInput(f'Protocol: metric must be {" or ".join(get_args(Metric))}, got "{self.metric}".')

    @property
    def facts(self) -> list[str]:
        """The settings that differ from the defaults, in words.

        >>> Protocol("isic", metric="balanced_accuracy").facts
        ['augmentation isic', 'judged by balanced accuracy']
        """
        weights = " with class weights" if self.class_weights else ""
        said = {
            f"augmentation {self.augment}": self.augment != "none",
            f"loss {self.loss}{weights}": self.loss != "cross_entropy" or bool(weights),
            f"judged by {self.metric.replace('_', ' ')}": self.metric != "accuracy",
        }
        return [words for words, unusual in said.items() if unusual]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "class_weights": list(self.class_weights)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Protocol:
        """The inverse of `to_dict`; missing entries have their defaults."""
        if unknown := set(values) - set(cls.__dataclass_fields__):
            raise BadInput(f"Protocol: unknown entries {sorted(unknown)}, expected {', '.join(vars(cls()))}.")
        return cls(**{**values, "class_weights": tuple(values.get("class_weights", ()))})
