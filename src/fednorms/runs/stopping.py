"""When a run ends before its last round: early stopping on validation data, or a callback that says so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from fednorms.core.errors import BadInput


class Stop(Enum):
    """The type of `fednorms.STOP`."""

    STOP = "stop"

    def __repr__(self) -> str:
        return "fednorms.STOP"


STOP: Final = Stop.STOP
"""What a callback returns to end a run after the present round."""


@dataclass(frozen=True)
class EarlyStopping:
    """End a run when the validation score has not improved for `patience` rounds.

    The score is the one that chooses the best validation round. Test data are never looked at.

    >>> EarlyStopping(patience=10)
    EarlyStopping(patience=10, on='val')
    >>> EarlyStopping(on="test")
    Traceback (most recent call last):
    fednorms.BadInput: EarlyStopping: on must be "val", got 'test'. A run that ends when its test score is best ...
    """

    patience: int = 10
    on: Literal["val"] = "val"

    def __post_init__(self) -> None:
        if self.on != "val":
            raise BadInput(
                f'EarlyStopping: on must be "val", got {self.on!r}. A run that ends when its test score is best '
                "reports a score that is too good."
            )
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise BadInput(f"EarlyStopping: patience must be a number of rounds >= 1, got {self.patience!r}.")


def patience_of(stop: EarlyStopping | None) -> int | None:
    """The patience that a recipe records.

    >>> patience_of(EarlyStopping(patience=3)), patience_of(None)
    (3, None)
    """
    if stop is not None and not isinstance(stop, EarlyStopping):
        raise BadInput(f"stop= must be fednorms.EarlyStopping(patience=...), got {stop!r}.")
    return stop.patience if stop else None
