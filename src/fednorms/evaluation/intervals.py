"""Intervals of scores: percentiles of bootstrap replicates, and Wilson's interval where these do not vary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95
_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_FEW = 200  # with fewer replicates, percentiles are rougher than the normal approximation


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval; NaN where it is not defined.

    >>> Interval(0.912, 0.85, 0.9614)
    Interval(0.912, 0.85 to 0.961)
    >>> str(Interval(0.912, 0.85, 0.9614)), str(Interval.undefined())
    ('91.2 [85.0, 96.1]', '-')
    """

    value: float
    low: float
    high: float

    @classmethod
    def undefined(cls) -> Interval:
        """A number that these data do not define, such as the recall of a class without images."""
        return cls(math.nan, math.nan, math.nan)

    @property
    def defined(self) -> bool:
        """Whether there is a number."""
        return not math.isnan(self.value)

    @property
    def certain(self) -> bool:
        """Whether the interval has no width, as if nothing could vary."""
        return self.high - self.low < 1e-9

    def to_dict(self) -> dict[str, float | None]:
        """Plain values, None for NaN."""
        return {k: None if math.isnan(v) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Interval:
        """The inverse of `to_dict`.

        >>> Interval.from_dict(Interval(0.5, 0.25, 0.75).to_dict())
        Interval(0.5, 0.25 to 0.75)
        """
        return cls(*(math.nan if values[k] is None else float(values[k]) for k in ("value", "low", "high")))

    def __str__(self) -> str:
        """In percent."""
        if not self.defined:
            return "-"
        if math.isnan(self.low):
            return f"{100 * self.value:.1f}"
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def __repr__(self) -> str:
        return f"Interval({self.value:.3g}, {self.low:.3g} to {self.high:.3g})"


def interval(value: float, replicates: np.ndarray) -> Interval:
    """The interval of a score from its bootstrap replicates; those that are not defined (NaN) are left out.

    Percentiles of 200 or more replicates, otherwise value ± 1.96 standard deviations. The interval always contains the
    value.
    """
    found = replicates[~np.isnan(replicates)]
    if math.isnan(value) or len(found) < 2:
        return Interval(value, math.nan, math.nan)
    if len(found) >= _FEW:
        low, high = np.percentile(found, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    else:
        low, high = value - _Z * found.std(ddof=1), value + _Z * found.std(ddof=1)
    return Interval(value, min(float(low), value), max(float(high), value))


def wilson(share: float, n: int) -> Interval:
    """Wilson's interval of a share of n independent images.

    >>> wilson(1.0, 5)
    Interval(1, 0.566 to 1)
    """
    if not n or math.isnan(share):
        return Interval(share, math.nan, math.nan)
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def share_interval(share: float, replicates: np.ndarray, n: int) -> Interval:
    """The interval of a share; Wilson's where replicates do not vary, so that they cannot show how sure it is.

    They do not vary if all or none of n images count, and if patients are drawn of whom each has this share.

    >>> share_interval(0.5, np.full(1000, 0.5), 4)
    Interval(0.5, 0.15 to 0.85)
    """
    found = interval(share, replicates)
    return wilson(share, n) if share in (0.0, 1.0) or found.certain else found
