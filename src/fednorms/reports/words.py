"""Numbers and modes in the words of a report."""

from __future__ import annotations

import math

from fednorms.evaluation.intervals import Interval

_MODELS = {
    "global": "the server's model",
    "personal": "each site's own model",
    "after_local": "each site's model right after its last local training",
    "adapted": "models fine-tuned at each site",
    "unseen": "the model for sites that never trained",
    "averaged": "the mean of the sites' models, which no site used in training",
}
_STATISTICS = {
    "own": "the site's own statistics",
    "batch": "statistics of the test batch",
    "re-estimated": "statistics re-estimated at the site",
    "test-time": "adaptation to its unlabeled test images",
}
INTERVALS = "Intervals cover 95 % and come from resampling the test images; they do not cover another training run."
WILSON = (
    "Intervals cover 95 % and follow from the number of test images (Wilson); they do not cover another training run."
)


def mode_words(label: str) -> str:
    """A mode in words.

    >>> mode_words("personal/re-estimated"), mode_words("global/global")
    ("each site's own model with statistics re-estimated at the site", "the server's model")
    """
    model, _, statistics = label.partition("/")
    kind = statistics.partition(":")[0]
    default = "own" if model == "personal" else "global"
    more = f" with {_STATISTICS[kind]}" if kind in _STATISTICS and kind != default else ""
    return f"{_MODELS.get(model, model)}{more}"


def share(found: Interval) -> str:
    """A share in percent with its interval.

    >>> share(Interval(0.8123, 0.78, 0.84)), share(Interval.undefined())
    ('81.2 % (78.0 to 84.0)', 'not defined')
    """
    if not found.defined:
        return "not defined"
    return f"{100 * found.value:.1f} %" + ("" if math.isnan(found.low) else f" ({between(found)})")


def between(found: Interval) -> str:
    """The ends of an interval in percent; empty if it has none."""
    return "" if math.isnan(found.low) else f"{100 * found.low:.1f} to {100 * found.high:.1f}"


def size(number: float) -> str:
    """A number of bytes.

    >>> size(950), size(62824), size(113_700_000)
    ('950 B', '62.8 kB', '114 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
