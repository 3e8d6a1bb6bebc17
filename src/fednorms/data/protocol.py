"""How papers train and judge on a data set, beside its images: a recipe's "auto" takes what stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fednorms.core.errors import BadInput

Metric = Literal["accuracy", "balanced_accuracy"]


@dataclass(frozen=True)
class Protocol:
    """What comes with a division of a data set: augmentation, loss, weights of the classes, and the score that counts.

    `augment` names a chain of `fednorms.transforms.CHAINS`, or "none"; without `class_weights` all classes weigh 1.

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
        """What is not the usual, in words.

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
        """The inverse of `to_dict`; what is absent is the usual."""
        if unknown := set(values) - set(cls.__dataclass_fields__):
            raise BadInput(f"Protocol: unknown entries {sorted(unknown)}, expected {', '.join(vars(cls()))}.")
        return cls(**{**values, "class_weights": tuple(values.get("class_weights", ()))})
